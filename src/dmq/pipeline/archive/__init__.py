"""The archive: tables of everything the journals held, and the job that fills them.

In reading order: `run` runs everything, `job` archives one broker, range by range of its journal, and has tasks work on
it; `extract` is what a task does with messages and with the outcomes in the journal's events, `settlement_join` finds
the messages of these; `key_index` has the rows that messages are found by; `table_store` commits to Delta tables,
`parquet` writes their files, `folder` is where they lie.
"""
