"""Archived messages back into a topic, each once for every replay id.

In reading order: `replay` is a whole replay; `selection` says which messages; `plan` is what is sent, written down
before, `plan_builder` makes it; `batches` are the plan's rows as a broker takes them, `sender` sends them.
"""
