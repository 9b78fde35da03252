"""What is optimised: facts, filters, advantages, preference pairs, losses, objectives, and the packing of batches."""
