"""A shard in simulation: real members, stores and elections; simulated clocks, network, registry and disks.

In reading order: `clock` and `loop` are virtual time; `network` and `registry` are what members reach each other by;
`service` and `client` are a broker's stand-in and those that use it; `process` is one machine, `cluster` all of them;
`checker` knows what must hold, `adversary` what goes wrong; `simulate` runs seeds by hand.
"""
