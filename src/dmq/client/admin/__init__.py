"""Administration of a broker, in reading order.

- `admin`: `client.admin`, what can be asked of a broker beside sending and consuming
- `registry`: `client.registry`, the key-value space of the broker
- `calls`: the conversations behind both
- `dead_letters`: the conversations about dead letters, and the letters themselves
- `shards`: the conversations about shards, and what they return
- `cluster`: the conversations about the whole cluster, the document of an export, and what stands in the wrong place
- `reports`: the values that the conversations return, and how those of several shards become one

`admin` and `registry` are generated from their asyncio twins in `dmq.client.aio`.
"""
