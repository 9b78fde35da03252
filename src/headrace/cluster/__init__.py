"""Ray: the connection, what is placed where, actors; and launching runs on a scheduler (launch/)."""
