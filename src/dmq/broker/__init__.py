"""The broker: takes messages, keeps them in its journal, and hands them to consumers.

Rooms from the lowest: `runtime` (clock, tasks, readiness), `journal` (the store's one writer, and reads), `catalog`
(topics, groups' beginnings, key-values), `delivery` (from the store to consumers), `retry`, `schedule` and
`dead_letters` (messages that are not where their consumer looks), `publish` (from producers into the journal),
`maintenance` (drain), `broker` (wires all of it together), `wire` (the protocol) and `diagnostics` (what people see),
`shard_process` (a member of a shard, which makes and drops the broker while it leads), `server` (ports and signals).
"""
