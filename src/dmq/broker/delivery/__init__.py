"""From the store to consumers: who consumes what, what goes out next, and what becomes of it.

In reading order: `client` (subscribe, pull, settle: the door), `channels` (all channels: pumped, ticked, forgotten, and
divided by their members), `channel` (one group at one topic), `group` (its members and whose turn it is, and which
queue is next), `cursor` (which offsets are next, out or settled), `lease` (what is out, what goes out again, and
the events of what is settled, as sets of offsets), `waiters` (sinks, pulls, watches for an ack), `origin`
(records where they stand, and which of them must not go out), `groups` (what an operator sees and does), `reader`
(reading without consuming).
"""
