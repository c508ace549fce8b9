"""The archive: tables of everything the journals held, and the job that fills them.

In reading order: `run` runs everything, `job` archives one broker, and has tasks work on it; `batch` says which range
of the journal is next, `extract` is what a task does with messages and with the outcomes in the journal's events,
`settlement_join` finds the messages of these; `key_index` has the rows that messages are found by, `key_directory`
which of its files have a hash; `table_store` commits to Delta tables, `parquet` writes their files, `folder` is where
they lie.
"""
