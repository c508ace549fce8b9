"""Spark writes topics: `df.write` and `df.writeStream` with `format("dmq")`.

In reading order: `data_writer` is what Spark calls, with the user's options, what a task does, and how it finds what an
earlier attempt has stored; `encoder` divides the rows, and makes records of them.
"""
