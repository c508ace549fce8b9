"""A disk in memory that forgets, tears, fills up and fails on demand.

In reading order: `nodes` are files and folders with their unwritten changes; `space` is what they take; `memory_file`
is an open file; `files` is the data directory; `faults` says what goes wrong; `crash` says what a power loss leaves.
"""
