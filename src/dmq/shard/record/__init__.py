"""What the registry holds of a shard.

In reading order: `shard_view` is what it says, and the door for writes; `enrolment` makes a data directory a member in
the shard's record; `registration` keeps the entry by which others find this broker.
"""
