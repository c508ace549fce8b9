"""A registry behind name servers, which keep it in a SQL database.

In reading order: `engine` opens a database, `schema` has the tables, `views` shows them to people, `expiry` says which
sessions are over, `sql_store` reads and writes; `wire` translates frames; `backend` is what a name server serves, and
`sql_backend` that of a database; `local_registry` is how the name server reads it itself, for routes; `server` is the
name server, and `client` the `Registry` that a broker uses. SQLAlchemy is imported from `engine` to `sql_store` alone.
"""
