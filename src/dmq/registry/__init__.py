"""The registry: what the brokers of a cluster agree on, and who of them is there.

In reading order: `registry` is the contract, which cluster logic alone knows; `paths` says where things stand in the
tree, `contents` what is written there. What implementations share: `tree` applies a write to entries in memory, `watch`
gathers changes for the caller, `tenure` says until when a session surely lives. `memory` is the implementation for
tests and for a single process; `name_server` has that of name servers over SQL, `zookeeper` that of ZooKeeper; `url`
opens one by its URL, and `lookup` asks it where the brokers are. On the contract stand `cluster_view`, what one process
knows of the whole cluster, with the routes of clients, `metadata`, the writes of what all brokers keep a view of, and
`topic_entries`, those of topics.
"""
