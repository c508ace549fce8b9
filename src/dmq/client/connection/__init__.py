"""Connection: `connection`, `failover`, `link`, `pool`, `reader_turns`, `request_retry`, `session`, `socket`,
`threads`, `url`."""
