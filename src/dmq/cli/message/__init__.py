"""Commands about messages: `send` publishes; `peek`, `find`, `tail` read without consuming; `trace` and `why` tell what
became of one. `messages` prints them for all.
"""
