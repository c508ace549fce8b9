"""The delay wheel: records that wait for their time.

In reading order: `wheel` hands out what is due; `fragment` is one of its parts, in memory; `wheel_files` are its files.
"""
