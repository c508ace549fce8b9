"""A registry behind name servers, which keep it in a SQL database, or serve one that is elsewhere.

In reading order: `engine` opens a database, `schema` has the tables, `views` shows them to people, `expiry` says which
sessions are over, `sql_store` reads and writes; `wire` translates frames; `backend` is what a name server serves, and
`sql_backend` that of a database. `front_backend` is that of a registry elsewhere, whose metadata `mirror` copies into
`mirror_store`. `local_registry` is how the name server reads what it serves, for routes; `server` is the name server,
and `client` the `Registry` that a broker uses.
"""
