"""The table of bars: `python -m bench.race`, all rows in one run, each beside its baseline, in turns.

In reading order: `bar` is what a figure has to reach, and whether it does; `rows` says what is measured beside what;
`load` runs in a process of each tree, with a broker of its own; `racer` is that process, seen from here; `contest`
measures a row; `host` names the machine; `table` prints.
"""
