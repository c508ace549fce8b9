"""The report on an archive: one page, as text, as HTML with charts, or as JSON; without Spark and without Java.

In reading order: `model` is what a report says; `collector` asks the archive, with the SQL of `queries`; `tables` are
its tables and its figures as texts; `text` and `html` write it.
"""
