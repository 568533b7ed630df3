"""Real servers for tests, each in a process of its own."""
