"""The local backend: torch on this machine."""
