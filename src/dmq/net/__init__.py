"""Connections and servers: the only place that touches asyncio transports."""
