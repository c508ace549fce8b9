"""Looking things up in the archive, without Spark and without Java.

In reading order: `lookup` finds messages and what became of them; `key_lookup` reads the index, of the files that
its directory names; `file_list` knows the tables' files; `engine` answers SQL over them, within limits,
also in an object store.
"""
