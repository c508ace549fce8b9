"""The spool: batches of a producer on its own disk until a broker has acknowledged them.

In reading order: `spool` is the disk, `parcel` a batch on it and in line to be sent; `sender` takes batches from the
accumulator to the disk, `drain` from there to a broker; `refused` keeps those that no broker takes.
"""
