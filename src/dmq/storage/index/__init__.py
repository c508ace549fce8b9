"""The index: where the messages of a queue stand in the journal, and which records have a key or an id.

In reading order: `queue_index` draws an entry, and has those of every queue; `lookup` finds records by key, id and
time; `block_file` is the file format that `lookup` and the delay wheel share.
"""
