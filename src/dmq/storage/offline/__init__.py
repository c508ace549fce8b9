"""Offline: `event_search`, `inspection`, `verification`."""
