"""Dead letters: from the journal into a database, and back to their topics.

In reading order: `dead_letters` (all of it, batches taken straight from producers, and back to the topic or the
group), `letter_thread` (calls of the database), `sql_drain` (from the journal into the database).
"""
