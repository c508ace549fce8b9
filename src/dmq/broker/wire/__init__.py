"""Wire: `commands`, `connection`, `consume`, `dead_letters`, `delays`, `dispatcher`, `groups`, `key_values`,
`message_history`, `produce`, `rate_limits`, `read`, `session`, `topics`, `transactions`."""
