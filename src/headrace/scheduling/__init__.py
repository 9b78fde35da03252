"""Scheduling: which groups start, when they are trained, and how stale ones are handled."""
