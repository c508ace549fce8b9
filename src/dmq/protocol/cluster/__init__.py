"""Headers that the processes of a cluster use among themselves, and those about them.

`registry` has those of brokers and name servers, `replication` those of the members of a shard, `shard` what people ask
of its members, `route` where clients find a topic,
`member` what one member says of itself, `cluster` what people ask of the cluster as a whole.
"""
