"""Trackers: where metrics go."""
