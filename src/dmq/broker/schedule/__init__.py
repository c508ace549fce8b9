"""Schedule: `delays`, `release_unit`, `transactions`."""
