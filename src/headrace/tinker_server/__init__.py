"""The Tinker API over the local engine and learner."""
