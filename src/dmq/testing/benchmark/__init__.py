"""What `dmq bench` measures with.

In reading order: `bodies` is what messages hold; `benchmark` has loads, rounds and figures; `baselines` and `floor` are
what the machine can do without DMQ; `throughput`, `latency` and `store_load` measure; `senders` is the process that
sends over many connections.
"""
