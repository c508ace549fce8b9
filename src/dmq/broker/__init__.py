"""The broker: what happens to messages between the store and those who send and consume them.

In reading order: `broker` wires the rooms together and `server` gives them ports; `wire` translates commands into
calls of the others; `publish` takes messages in, `journal` writes them, `catalog` knows topics and groups, `delivery`
hands messages out, `retry`, `schedule` and `dead_letters` are for those that come later or never; `maintenance` takes
a broker out of use; `diagnostics` tells what is going on.
"""
