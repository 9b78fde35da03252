"""Backend "verl": Headrace's loop over verl's worker group. Only the modules here import verl, each when it is used."""
