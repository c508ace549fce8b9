"""Retry: `mover`, `policy`, `record_copy`."""
