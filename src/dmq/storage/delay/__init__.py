"""The delay wheel: records that wait for their time.

In reading order: `wheel` hands out what is due, and has the files; `fragment` is one of its parts, in memory.
"""
