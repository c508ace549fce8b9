"""Publish: `rate_limits`."""
