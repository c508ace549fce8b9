"""Pure tests: no network, no other process, thousands a second."""
