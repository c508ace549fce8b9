"""Commands on what is on this machine or in a database, without a broker.

In reading order: `context`, `config`,
`journal`, `backup`, `restore`, `spool`, `outbox`.
"""
