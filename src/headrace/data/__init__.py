"""The data model (tasks, episodes, samples), and where tasks come from."""
