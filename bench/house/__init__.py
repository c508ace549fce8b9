"""How the source tree is built, in figures: `./scripts/house`.

In reading order: `source_tree` parses the tree, `imports` finds who imports whom, `rules` finds the places that break a
rule, `route` counts the files a message passes, `table` puts the figures beside their aims.

The tests of style (`tests/unit/test_style.py`) use the same code, so a figure and a rule never disagree.
"""
