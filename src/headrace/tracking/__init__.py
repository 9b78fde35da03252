"""Tracking: metrics, and the trackers that show and store them."""
