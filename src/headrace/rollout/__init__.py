"""Agents: what users write (workflows), the model handed to them, and what runs them over tasks."""
