"""Offline: working on a data directory without its broker, or beside it.

In reading order: `inspection` shows what is in it, `verification` checks every file, `backup` makes copies and restores
them.
"""
