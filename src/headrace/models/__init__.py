"""Models by name: what ships with the package, what can be fetched, and whether a model folder is sound."""
