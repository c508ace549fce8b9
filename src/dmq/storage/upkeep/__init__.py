"""Upkeep: what keeps a data directory good over restarts, crashes and years.

In reading order: `identity` says whose a directory is, `directory` opens one, `recovery` mends what a crash left,
`damage` puts back what the disk lost,
`checkpointer` writes checkpoints, `retention` decides which segments go and what of them is carried on.
"""
