"""Spark reads topics: `spark.read` and `spark.readStream` with `format("dmq")`.

In reading order: `data_source` is what Spark calls, and what a task does; `options` are the user's; `offsets` are
Kafka's JSON; `resolver` asks the broker which offsets are meant; `filters` narrow them; `partition_plan` divides them
among tasks; `columns` are those of the result; `stream_lag` says how far streams are behind.
"""
