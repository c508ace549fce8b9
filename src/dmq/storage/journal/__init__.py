"""The journal: units of records, appended one after another.

In reading order: `unit` draws the bytes of a unit and reads them, `unit_builder` makes them; `journal` keeps the
segment files, `scanner` reads units from them in order, `window_cache` remembers those that were read or written last;
`unit_draft` decides what goes into which unit, `lone_unit` does both for plain messages that came one by one,
`unit_writer` appends, `flush_policy` says who flushes, and `visibility` what readers may see.
"""
