"""The encoder: from the messages of a batch to the body of its request.

What always holds: a batch is encoded once; its messages are let go then, since the records hold everything.
"""

from __future__ import annotations

import threading

from dmq.client.accumulator import Batch
from dmq.clock import Clock
from dmq.model import Message
from dmq.protocol import Buffer, pack_batch, pack_lone
from dmq.records import Compressor, encode_batch, encode_lone, encode_plain

__all__ = ["BatchEncoder"]


class BatchEncoder:
    """Encodes for one producer.

    Parameters:
        app: who sends.
        clock: for the send times.
        compressor: compresses bodies where it pays; None leaves all as they are.
    """

    def __init__(self, app: str, clock: Clock, compressor: Compressor | None) -> None:
        self._app = app
        self._clock = clock
        self._compressor = compressor
        self._encoding = threading.Lock()  # a compressor serves one thread at a time

    def encode(self, batch: Batch, body_bytes_max: int) -> None:
        """Turn a batch's messages into the body of its request.

        Parameters:
            body_bytes_max: the largest body, after compression.

        Raises:
            InvalidMessage, MessageTooLarge: a message cannot be sent.
        """
        if batch.count == 1 and not batch.dues and not batch.has_extras:
            message = Message(batch.bodies[0], batch.keys[0]) if batch.is_plain else batch.messages[0]
            if type(message.body) is bytes and len(message.body) <= body_bytes_max:
                batch.body, batch.key_count = self.encode_lone(batch.topic, message)
                batch.drop_messages()
                return
        now_ms = self._clock.now_ms()
        with self._encoding:
            if batch.is_plain:
                encoded = encode_plain(
                    batch.topic,
                    self._app,
                    batch.bodies,
                    batch.keys,
                    sent_at_ms=now_ms,
                    compressor=self._compressor,
                    body_bytes_max=body_bytes_max,
                )
            else:
                encoded = encode_batch(
                    batch.topic,
                    self._app,
                    batch.messages,
                    sent_at_ms=now_ms,
                    compressor=self._compressor,
                    extra=batch.extras if batch.has_extras else b"",
                    body_bytes_max=body_bytes_max,
                )
        batch.key_count = len(encoded.hashes)
        batch.body = pack_batch(encoded, batch.dues)
        batch.drop_messages()  # the records hold everything; the objects may go

    def encode_lone(self, topic: str, message: Message) -> tuple[list[Buffer], int]:
        """The body of a request with one message that is not too large, and how many keys it has.

        Raises:
            InvalidMessage: it cannot be sent.
        """
        body, codec = message.body, 0
        if self._compressor is not None:
            with self._encoding:
                codec, body = self._compressor.compress(topic, body)
        record = encode_lone(topic, self._app, message, self._clock.now_ms(), body, codec)
        return pack_lone(record), 1 if record.key_hash else 0
