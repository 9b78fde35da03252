"""The stages between rollouts and the learner: pure logic, no torch, no clock of its own."""
