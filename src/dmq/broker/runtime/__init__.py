"""What every room of the broker runs on, and nothing of messages.

In reading order: `runtime` (time that never runs backwards, whether the broker takes new work, coroutines under way,
how long things took), `service_manager` (systemd, which is told).
"""
