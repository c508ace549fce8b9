"""Archived messages back into a topic, each once for every replay id, by one process or by Spark.

In reading order: `replay` is a whole replay; `plan` says which messages, and is what is sent, written down before;
`plan_builder` makes it and writes its rows; `sender` sends them as a broker takes them. `spark_replay` makes and sends
a plan with Spark.
"""
