"""What every room of the broker runs on, and nothing of messages.

In reading order: `runtime` (the three below in one struct), `steady_clock` (time that never runs backwards),
`readiness` (whether the broker takes new work), `tasks` (coroutines under way), `histogram` (how long things took),
`service_manager` (systemd, which is told), `watchdog` (a thread that sees when the loop stands still).
"""
