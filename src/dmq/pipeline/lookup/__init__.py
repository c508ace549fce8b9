"""Looking things up in the archive, without Spark and without Java.

In reading order: `lookup` finds messages, by the index too, and what became of them; `engine` answers SQL over the
tables' files, within limits, also in an object store.
"""
