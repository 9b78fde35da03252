"""Weights on their way from the learner to the engines: transports and digests."""
