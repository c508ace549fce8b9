"""Upkeep: `checkpoint`, `checkpointer`, `directory`, `recovery`, `retention`."""
