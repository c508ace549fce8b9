"""Commands about messages.

In reading order: `send` publishes, many as a `stream`; `consume` consumes with a group; `peek`, `find`, `tail` read
without consuming; `trace` and `why` tell what became of one. `messages` prints them for all.
"""
