"""vLLM servers, which sample with the weights that are synced to them."""
