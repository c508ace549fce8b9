"""Connections to brokers, in reading order.

- `url`: addresses
- `session`, `link`: the protocol without a socket, and what others see of a connection
- `threads`, `socket`, `reader_turns`, `connection`: the connection of a blocking program
- `failover`, `request_retry`: which address is tried next, and which request is sent again
- `pool`: one connection to one broker, kept up
- `route_book`, `route_keeper`: what is known of a cluster, and when it is asked for
- `shard_health`, `place_choice`: which shard gets a message that may go to any
- `router`: which broker a message goes to
"""
