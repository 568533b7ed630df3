"""Actors in a local Ray cluster, killed."""
