"""OpenAI's API, and token-level generation, over our engine: for other tools to use what was trained."""
