"""Backend "fsdp": the local learner run by N ranks, which share parameters, gradients and optimizer state (FSDP2)."""
