"""What a model says when it wants a tool: how it is read."""
