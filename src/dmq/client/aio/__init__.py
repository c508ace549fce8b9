"""The client on an event loop, in reading order.

- `client`: `dmq.aio.connect` and what it gives
- `producer`, `transaction`; `consumer`, `message`, `subscriber`, `executor`: sending and consuming
- `admin`, `registry`: administration, and the key-value space
- `router`, `pool`, `connection`: the connections below
- `waiter`: a task that waits to be woken

`./scripts/twins` writes the blocking twins of `admin`, `client`, `consumer`, `registry` and `transaction`.
"""
