"""Spark writes topics: `df.write` and `df.writeStream` with `format("dmq")`.

In reading order: `data_writer` is what Spark calls, and what a task does; `options` are the user's; `row_blocks`
divides the rows, `encoder` makes records of them, and `resume` finds what an earlier attempt has stored.
"""
