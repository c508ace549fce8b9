"""Decode: `arrow`, `attributes`, `bodies`, `journal_reader`, `rows`, `units`."""
