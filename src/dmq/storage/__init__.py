"""The message store: one journal, and everything derived from it."""
