"""Looking things up in the archive, without Spark and without Java.

In reading order: `lookup` finds messages and what became of them; `key_lookup` reads the index, `directory` says
which files of it; `file_list` knows the tables' files; `engine` answers SQL over them, within limits;
`store_files` are files of an object store, for it.
"""
