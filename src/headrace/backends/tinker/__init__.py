"""Training and sampling through the Tinker API, with its official SDK."""
