"""The shard: a leader and its followers, who keep one journal.

In reading order: `divergence` says where two journals part, `in_sync` which members must have a unit before it is
committed, `serving_right` whether a leader may answer now, `election` who becomes the next one; all of them are pure.
`follower` takes a leader's journal, `feed` is what a leader sends to one follower, `leader` what it knows of all of
them; these have no I/O of their own. `peers` says how members reach each other, and `network` is how they do;
`service` says what a member and its broker know of each other, `place` who a member is. `record` is what the registry
holds of the shard, `roles` what a member does in each of its roles, and `member` owns the role; `heart` shows a thread
beside it that it lives, `report` tells people where it stands. `repair` fetches from another member what the disk of
one lost, and `committed_reader` reads a follower's journal for Spark. `admin` is what people see of shards and do to
them.
"""
