"""Connections and servers: the only place that touches asyncio transports.

`connection` is one connection of a server, and what joins the writes of many; `server` accepts them and looks after
them; `hello` is what a server checks of the first request; `link` is one connection to a server of ours; `address`
says where a server may listen and how addresses are written; `lines` and `pages` serve lines of text and pages of HTTP
on ports of their own.
"""
