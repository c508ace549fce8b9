"""Looking things up in the archive, without Spark and without Java."""
