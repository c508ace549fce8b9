"""KEY_PUT, KEY_GET, KEY_LIST, KEY_DELETE: the key-value space. A drained broker still serves it."""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.wire.session import Session
from dmq.protocol import key_values
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header
from dmq.storage.state.events import KeyPut

__all__ = ["delete_key", "get_key", "list_keys", "put_key"]

_MS_MAX = (1 << 63) - 1


async def put_key(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyPut) -> None:
    broker.check_open()
    expires_at_ms = min(broker.now_ms + asked.ttl_ms, _MS_MAX) if asked.ttl_ms else 0
    await broker.keys.put(KeyPut(asked.namespace, asked.key, asked.value, expires_at_ms))
    session.answer(frame, Header())


def get_key(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyGet) -> None:
    found = broker.keys.get(asked.namespace, asked.key)
    session.answer(frame, key_values.KeyReply(None if found is None else _info(broker, found)))


def list_keys(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyList) -> None:
    chosen = [
        entry
        for entry in broker.keys.among(asked.namespace)
        if entry.key.startswith(asked.prefix) and entry.key > asked.after
    ]
    page = [_info(broker, entry) for entry in chosen[: asked.limit]]
    session.answer(frame, key_values.KeyListReply(page, len(chosen) > asked.limit))


def _info(broker: Broker, entry: KeyPut) -> key_values.KeyInfo:
    left_ms = max(1, entry.expires_at_ms - broker.now_ms) if entry.expires_at_ms else 0
    return key_values.KeyInfo(entry.key, entry.value or b"", left_ms)


async def delete_key(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyDelete) -> None:
    broker.check_open()
    session.answer(frame, key_values.KeyDeleteReply(await broker.keys.delete(asked.namespace, asked.key)))
