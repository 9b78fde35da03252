"""The same scheduling on a virtual clock, without a model."""
