"""What is optimised: filters, advantages, preference pairs, losses, objectives, and the packing of batches."""
