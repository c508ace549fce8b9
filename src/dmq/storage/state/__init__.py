"""The state: what follows from the journal and is small enough for memory.

In reading order: `events` are the records that change it; `state` has topics, transactions, key-values, subscriptions,
limits, and which leader began to write where, `positions` how far groups have come and how far they are behind,
`producers` the last batches of every producer; `derived` applies a unit to all that is derived, the index and the delay
wheel included, and writes down how far the derived files are good.
"""
