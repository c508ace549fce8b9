"""Topics and groups by name, and the key-value space.

In reading order: `catalog` (topics, and where groups begin), `changes` (changes under way, and requests that wait for
them), `key_values`.
"""
