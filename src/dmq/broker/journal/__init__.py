"""Journal: `disk`, `writer`."""
