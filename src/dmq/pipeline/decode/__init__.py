"""Units of the journal as columns of Arrow.

In reading order: `journal_reader` fetches units from a broker, also one of an earlier version, or from each shard of a
cluster; `units` makes columns of numpy of them; `rows` makes the archive's rows, with `arrow` for the arrays.
"""
