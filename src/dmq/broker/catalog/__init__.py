"""Topics and groups by name, and the key-value space.

In reading order: `catalog` (topics, and where groups begin), `changes` (changes under way, and requests that wait for
them); in a cluster `cluster_access` (the registry, the leaders of other shards, and the groups), `cluster_topics` (what
a shard's leader makes of the topics in the registry); `key_values` (the key-value space of a broker, and of a cluster).
"""
