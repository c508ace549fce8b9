"""Commands that run something until it is told to end.

In reading order: `server_process` is what they share (logs, signals), `child_process` a process that one of them
starts; `broker` with `broker_group`, `dev` with `dev_cluster`, and `tour` run brokers;
`nameserver` runs a name server; `bench` measures.
"""
