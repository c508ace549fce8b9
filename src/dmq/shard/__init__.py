"""The shard: a leader and its followers, who keep one journal.

In reading order, all of it pure: `divergence` says where two journals part, `in_sync` which members must have a unit
before it is committed, `serving_right` whether a leader may answer now, `election` who becomes the next one. The parts
that talk to peers and to the registry come on top of these.
"""
