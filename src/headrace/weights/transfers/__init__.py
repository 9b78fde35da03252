"""How tensors travel to servers, each way in a file of its own. All of it runs on the learner's thread or ranks."""
