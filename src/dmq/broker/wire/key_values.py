"""KEY_PUT, KEY_GET, KEY_LIST, KEY_DELETE: the key-value space."""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.wire.session import Session
from dmq.protocol import key_values
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header

__all__ = ["delete_key", "get_key", "list_keys", "put_key"]


async def put_key(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyPut) -> None:
    await (broker.cluster_keys or broker.keys).put(asked.namespace, asked.key, asked.value, asked.ttl_ms)
    session.answer(frame, Header())


async def get_key(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyGet) -> None:
    shared = broker.cluster_keys
    if shared is None:
        found = broker.keys.get(asked.namespace, asked.key)
    else:
        found = await shared.get(asked.namespace, asked.key)
    session.answer(frame, key_values.KeyReply(None if found is None else key_values.KeyInfo(*found)))


async def list_keys(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyList) -> None:
    shared, which = broker.cluster_keys, (asked.namespace, asked.prefix, asked.after, asked.limit)
    page, more = broker.keys.page(*which) if shared is None else await shared.page(*which)
    session.answer(frame, key_values.KeyListReply([key_values.KeyInfo(*entry) for entry in page], more))


async def delete_key(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyDelete) -> None:
    keys = broker.cluster_keys or broker.keys
    session.answer(frame, key_values.KeyDeleteReply(await keys.delete(asked.namespace, asked.key)))
