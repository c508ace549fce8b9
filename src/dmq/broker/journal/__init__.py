"""The store as the broker uses it: one writer, and reads that do not block the loop.

In reading order: `journal` (all of it in one struct, and when the journal had reached an offset), `writer` (appends
what all clients submitted in one turn as one unit), `shard_writer` (the same for a shard's leader), `disk` (flushes,
and questions that may need the disk), `unit_fetch` (units for a reader of the journal, or of some topics), `arrivals`
(waiting for the journal to grow).
"""
