"""Servers that sample: started, watched and ended by Headrace, or somebody else's; and plain calls to them."""
