"""Spark reads topics: `spark.read` and `spark.readStream` with `format("dmq")`.

In reading order: `data_source` is what Spark calls; `options` are the user's; `offsets` are Kafka's JSON; `resolver`
asks the broker which offsets are meant; `filters` narrow them; `partition_plan` divides them among tasks;
`partition_reader` is what a task does; `columns` are those of the result; `stream_lag` says how far streams are behind.
"""
