"""An OpenAI-compatible endpoint in front of an engine: what agents do is recorded with its ids."""
