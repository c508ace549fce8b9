"""Reading: records by queue offset, key, id and time.

In reading order: `reader` finds and verifies them, `record_origin` says whose they are and when they were stored,
`record_group` collects records that stand anywhere in the journal, `read_failures` remembers what the disk refused.
"""
