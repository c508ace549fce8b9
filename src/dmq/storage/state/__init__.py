"""State: `derived`, `events`, `positions`, `producers`, `state`."""
