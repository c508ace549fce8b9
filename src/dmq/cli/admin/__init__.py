"""Commands that operate a broker.

In reading order: `topic`, `group`, `limit`; `delay`, `tx` and `dlq` for messages that wait or died; `cluster`,
`balance`, `shard`, `top` and `doctor` for brokers.
"""
