"""A registry behind name servers, which keep it in a SQL database.

In reading order: `schema` has the tables, `expiry` says which sessions are over, `sql_store` reads and writes;
`wire` translates frames; `server` is the name server, and `client` the `Registry` that a broker uses. SQLAlchemy is
imported by `schema`, `expiry` and `sql_store` alone.
"""
