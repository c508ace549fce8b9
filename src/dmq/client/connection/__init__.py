"""Connections to brokers, in reading order: `url` (addresses), `session` (the protocol, without a socket), `link` (what
others see of a connection), `socket`, `reader_turns` and `threads` (what a blocking connection is made of),
`connection`, `failover` (which address is tried next), `request_retry` (when a request is sent again), `pool` (one
connection to one broker, kept up) and `router` (which broker a message goes to)."""
