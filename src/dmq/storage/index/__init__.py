"""The index: where the messages of a queue stand in the journal, and which records have a key or an id.

In reading order: `queue_index` has the entries of every queue; `index_run` draws an entry, and holds those that are not
in a file of their own yet; `lookup` finds records by key, id and time; `block_file` is the file format that `lookup`
and the delay wheel share.
"""
