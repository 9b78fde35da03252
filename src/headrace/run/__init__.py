"""The run directory: its lock, checkpoints with their manifest, and random states."""
