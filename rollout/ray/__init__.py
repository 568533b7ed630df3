"""Rollouts on Ray: engines and workers as actors, where a layout file places them."""
