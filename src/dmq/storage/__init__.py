"""The message store: one journal, and everything derived from it.

In reading order: `files` and `file_pool` are the disk; `journal` is the log of units; `state`, `index` and `delay` are
what is derived from it; `read` finds records; `upkeep` opens, checkpoints, recovers and retains; `queries` and `store`
are what others call, `group_commit` for many threads; `offline` looks into a directory that no broker has open.
"""
