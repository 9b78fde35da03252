"""Suites that every backend and every engine must pass."""
