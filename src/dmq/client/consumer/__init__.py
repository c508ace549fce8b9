"""Consuming, in reading order.

- `options`: what a consumer asks for
- `delivery`, `message`: what it gets
- `prefetch`: what is handed out when
- `leases`, `core`: what is in hand, what was there before, and what is said of it
- `strategy`, `subscription`, `puller`: what brokers are told and tell
- `subscriber`: how a consumer waits for messages and reports what was done with them
- `consumer`, `handler`, `executor`: what a program iterates over, pulls from or runs a handler with, until a signal
  stops it; `./scripts/twins` writes `consumer` from its asyncio twin
- `follow`: reading a topic without a group
"""
