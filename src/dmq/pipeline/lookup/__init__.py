"""Looking things up in the archive, without Spark and without Java.

In reading order: `lookup` finds messages, by the index too, and what became of them; `file_list` knows the tables'
files; `engine` answers SQL over them, within limits, also in an object store.
"""
