"""Read: `reader`, `record_group`, `record_origin`."""
