"""Servers: the local engine and learner behind APIs that other programs speak."""
