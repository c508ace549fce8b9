"""Index: `block_file`, `index_entry`, `index_run`, `lookup`, `queue_index`."""
