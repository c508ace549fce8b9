"""The spool: batches of a producer on its own disk until a broker has acknowledged them.

In reading order: `spool` is the disk, also for batches that no broker takes; `parcel` a batch on it and in line to be
sent; `sender` takes batches from the accumulator to the disk, `drain` from there to a broker.
"""
