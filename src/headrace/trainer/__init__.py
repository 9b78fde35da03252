"""The trainer: its loops, its callbacks, and how a run is set up and recovered."""
