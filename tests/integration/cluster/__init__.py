"""Several shards of real processes: routes, topics over all of them, and what clients make of it."""
