"""Dead letters in SQL: one table, on SQLite, MariaDB / MySQL or PostgreSQL.

`letter` is what a dead letter is, and how a record becomes one and back; `url` says where the database is; `schema` is
the table; `store` puts, lists and marks. Nothing here knows of brokers, and SQLAlchemy is imported by `schema` and
`store` alone: who has no dead letters never pays for it.
"""
