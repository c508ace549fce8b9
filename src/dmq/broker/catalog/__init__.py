"""Catalog: `catalog`, `changes`, `key_values`."""
