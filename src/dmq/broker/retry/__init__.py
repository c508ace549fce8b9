"""What becomes of messages that fail: another attempt, or the dead letters.

In reading order: `policy` (how long a message waits), `mover` (settles it where it was and sends a copy on: all that
moves in one turn is one unit).
"""
