"""The message store: one journal, and everything derived from it.

In reading order: `files` and `file_pool` are the disk, `disk_space` how full it is; `journal` is the log
of units; `index`, `delay` and `state` are what is derived from it; `read` finds records; `upkeep` opens, checkpoints,
recovers and retains; `replica` follows a leader's journal; `queries` answers questions, `store` writes, and
`group_commit` is the owner of a store for many threads; `offline` looks into a directory that no broker has open.

Each room imports only from those below it:

    group_commit, offline
    store
    queries, replica
    upkeep
    read
    journal.unit_writer, journal.unit_draft    a unit is drafted and written with what the state knows
    state
    delay
    index
    journal    unit, journal, scanner
    file_pool
    disk_space
    files
"""
