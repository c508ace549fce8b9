"""From producers into the journal.

In reading order: `publisher` (plain, delayed, half and replayed messages, one way for all; how far producers have
come), `straight_path` (a shorter way with the same result for plain messages that come one by one), `rate_limits` (how
much a second a topic or an app may send, and the share of each shard).
"""
