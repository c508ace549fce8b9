"""Dead letters: `dead_letters`, `resend`, `sql_drain`."""
