"""The built-in engine in a process of its own."""
