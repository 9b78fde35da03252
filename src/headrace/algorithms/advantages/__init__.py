"""Advantages: one function per estimator, and the one place that assigns them."""
