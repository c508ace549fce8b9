"""Parts of derived tables: sums that add up, so that what is new is a few rows more, and what is made of them.

In reading order: `rollup_parts` makes the rows of `rollup_part` of new messages and events, and finds the messages
that events are about; `day_metrics` makes the metrics and positions of a day of
them. `letter_parts` is the same for dead letters.
"""
