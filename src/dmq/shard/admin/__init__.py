"""What people see of shards and do to them, without a wire.

In reading order: `overview` says what a shard is up to and what is wrong with it, `record_change` what its record is to
be after a command, `operations` looks and changes, as a member or as a `visitor` who is none. `cluster_overview` says
what is wrong with the cluster as a whole, `rebuilt_record` what a lost record was, and `cluster_operations` looks and
changes there. `departure` makes a member's directory that of a broker by itself.
"""
