"""What `dmq bench` measures with.

In reading order: `benchmark` has loads, rounds and figures; `baselines` is what the machine can do without DMQ;
`throughput`, `latency` and `store_load` measure; `senders` is the process that sends over many connections.
"""
