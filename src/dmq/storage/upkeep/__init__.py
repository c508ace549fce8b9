"""Upkeep: what keeps a data directory good over restarts, crashes and years.

In reading order: `identity` says whose a directory is, `directory` opens one, `recovery` mends what a crash left,
`scrub` looks for what the disk lost, `damage` puts it back,
`checkpointer` writes checkpoints, `retention` decides which segments go and what of them is carried on.
"""
