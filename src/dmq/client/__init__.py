"""The client: what runs in the processes that send and consume messages. In reading order:

- `client`: `dmq.connect` and the client of a blocking program; `aio`: the same on an event loop
- `connection`: sockets, sessions, and which broker is talked to
- `producer`: sending; `spool`: messages kept on disk until a broker has them
- `consumer`: subscriptions, leases and handlers
- `admin`: administration, and the key-value space
- `broker_view`: a broker as a client sees it, for `dmq doctor`
- `arguments`: what users may pass
"""
