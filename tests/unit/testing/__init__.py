"""The things that ship for tests."""
