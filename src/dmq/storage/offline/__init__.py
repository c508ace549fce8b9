"""Offline: looking into a data directory that no broker has open.

In reading order: `inspection` shows what is in it, `verification` checks every file, `event_search` finds events.
"""
