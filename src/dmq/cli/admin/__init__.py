"""Commands that operate a broker.

In reading order: `topic`, `group`, `limit`; `delay`, `tx` and `dlq` for messages that wait or died; `cluster`
with `cluster_check`, `balance`, `shard`, `top` and `doctor` for brokers.
"""
