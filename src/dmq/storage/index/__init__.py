"""The index: where the messages of a queue stand in the journal, and which records have a key or an id.

In reading order: `index_entry` is one entry; `queue_index` has those of every queue, and `index_run` holds those that
are not in a file of their own yet; `lookup` finds records by key, id and time; `block_file` is the file format that
`lookup` and the delay wheel share.
"""
