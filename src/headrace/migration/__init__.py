"""Moving in: configurations of other trainers become run files, with a list of what became of every setting."""
