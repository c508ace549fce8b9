"""DMQ's own protocol: handlers that translate between frames and operations, and decide nothing.

In reading order: `dispatcher` (takes a frame to its handler), `commands` (the table), `session` (one connection that
said hello), and a file of handlers for each subject: `connection`, `produce`, `schedule`, `consume`, `groups`,
`topics`, `read`, `dead_letters`, `rate_limits`, `key_values`, `message_history`, `shard`.
"""
