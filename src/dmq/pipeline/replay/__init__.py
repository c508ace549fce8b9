"""Archived messages back into a topic, each once for every replay id, by one process or by Spark.

In reading order: `replay` is a whole replay; `selection` says which messages; `plan` is what is sent, written down
before, `plan_builder` makes it and writes its rows; `sender` sends them as a broker takes them. `spark_plan` and
`spark_sender` do the same with Spark.
"""
