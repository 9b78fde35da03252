"""Judgers: who scores episodes."""
