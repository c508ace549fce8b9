"""DMQ for asyncio: `async with dmq.aio.connect("dmq://127.0.0.1:9611", app="shop") as client: …`.

The same names and meanings as `dmq`, with `await`.
"""

from __future__ import annotations

from dmq.client.aio.client import AioClient, connect
from dmq.client.aio.consumer import AioConsumer
from dmq.client.aio.message import AioBatch, AioMessage
from dmq.client.aio.producer import AioProducer, AioSendFuture

__all__ = ["AioBatch", "AioClient", "AioConsumer", "AioMessage", "AioProducer", "AioSendFuture", "connect"]
