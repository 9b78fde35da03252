"""Scheduling: which groups are started, when they are trained, and what becomes of stale ones."""
