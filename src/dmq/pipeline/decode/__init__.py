"""Units of the journal as columns of Arrow.

In reading order: `journal_reader` fetches units from a broker, also one of an earlier version,
`cluster_reader` fetches from each shard; `units` makes columns of numpy of them; `attributes` reads the variable part
of the records, `bodies` expands them; `rows` makes the archive's rows, with `arrow` for the arrays.
"""
