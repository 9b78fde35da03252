"""Advantages: one function per estimator, and their assignment to groups."""
