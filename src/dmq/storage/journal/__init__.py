"""The journal: units of records, appended one after another.

In reading order: `unit` draws the bytes of a unit and reads them; `journal` keeps the segment files, says who flushes,
and remembers what was read or written last, `scanner` reads units from it in order; `unit_draft` decides what goes into
which unit, and makes its bytes; `unit_writer` appends units, lays out those of
plain messages that came one by one, and says what readers may see.
"""
