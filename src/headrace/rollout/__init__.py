"""Rollouts: workflows, the model that they call, tools, environments, the gateway, the agent loop that runs them."""
