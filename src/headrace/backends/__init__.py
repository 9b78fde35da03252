"""Backends own the trainable model."""
