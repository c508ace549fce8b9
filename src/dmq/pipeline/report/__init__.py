"""The report on an archive: one page, as text, as HTML with charts, or as JSON; without Spark and without Java."""
