"""Dead letters in SQL: one table, on SQLite, MariaDB / MySQL or PostgreSQL.

In reading order: `letter` is what a dead letter is, and how a record becomes one and back; `url` says where the
database is, `engines` opens it; `schema` is the table; `store` puts, lists and marks. Nothing here knows of brokers,
and SQLAlchemy is imported by `schema`, `engines` and `store` alone: a broker without dead letters never loads it.
"""
