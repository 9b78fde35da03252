"""Rollout engines: tokens in; tokens, log-probabilities and versions out."""
