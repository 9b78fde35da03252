"""The words of the domain as data: tasks, episodes, samples."""
