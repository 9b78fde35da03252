"""Rollouts: workflows, the model that they call, tools, environments, the gateway, and the manager that runs them."""
