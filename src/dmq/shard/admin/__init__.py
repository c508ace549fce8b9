"""What people see of shards and do to them, without a wire.

In reading order: `overview` says what a shard is up to and what is wrong with it, `operations` looks and changes.
"""
