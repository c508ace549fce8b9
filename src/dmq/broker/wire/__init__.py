"""DMQ's own protocol: handlers that translate between frames and operations, and decide nothing.

In reading order: `dispatcher` (takes a frame to its handler), `commands` (the table), `session` (one connection that
said hello), and a file of handlers for each subject: `connection`, `messages`, `catalog`, `read`,
`dead_letters`, `shard`.
"""
