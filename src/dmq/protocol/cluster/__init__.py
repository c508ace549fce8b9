"""Headers that the processes of a cluster use among themselves.

`registry` has those of brokers and name servers, `replication` those of the members of a shard.
"""
