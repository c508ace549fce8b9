"""Journal: `journal`, `scanner`, `unit`, `unit_builder`, `unit_draft`, `unit_writer`, `visibility`, `window_cache`."""
