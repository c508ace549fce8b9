"""Archived messages back into a topic, each once for every replay id."""
