"""Repair: what mends an effect that got lost between outbox and inbox. In reading order:

- `compensator`: asks for the results that senders have not got
- `confirm_service`: answers it at the consumers
- `purge`, `table_reader`: old rows are deleted, and the tables read
"""
