"""Connections to brokers, in reading order.

- `url`: addresses
- `session`, `link`: the protocol without a socket, and what others see of a connection and of the health of its shard
- `threads`, `socket`, `connection`: the connection of a blocking program, and which thread reads it
- `joint_turn`: one thread that reads several
- `failover`: which address is tried next, and which request is sent again
- `pool`: one connection to one broker, kept up
- `route_book`: what is known of a cluster, when it is asked for, and which shard gets a message that may go to any
- `router`: which broker a message goes to
"""
