"""When settings have effect: for each file of sections the conditions that its fields name."""
