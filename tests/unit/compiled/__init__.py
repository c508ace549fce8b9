"""The compiled loops beside the plain functions they stand for: equal bytes, verdicts and state, inside of buffers."""
