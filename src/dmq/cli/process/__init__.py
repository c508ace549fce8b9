"""Commands that run something until it is told to end.

In reading order: `server_process` is what they share (logs, signals); `broker`, `dev` with `dev_shard`, and `tour` run
brokers; `nameserver` runs a name server; `bench` measures.
"""
