"""What people see of shards and do to them, without a wire.

In reading order: `overview` says what a shard is up to and what is wrong with it, `record_change` what its record is to
be after a command, `operations` looks and changes, as a member or as a `visitor` who is none.
"""
