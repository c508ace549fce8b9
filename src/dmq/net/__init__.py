"""Connections and servers: the only place that touches asyncio transports.

`connection` is one connection of a server, and what joins the writes of many; `server` accepts them and looks after
them; `lines` and `pages` serve lines of text and pages of HTTP on ports of their own.
"""
