"""The journal: units of records, appended one after another.

In reading order: `unit` draws the bytes of a unit and reads them, `unit_builder` makes them; `journal` keeps the
segment files and says who flushes, `scanner` reads units from them in order, `window_cache` remembers those that were
read or written last; `unit_draft` decides what goes into which unit; `unit_writer` appends units, lays out those of
plain messages that came one by one, and says what readers may see.
"""
