"""Writing the rows of a partition into topics: what a task of the sink does, without Spark.

What always holds: when `write_rows` returns, every row is stored as its durability says; rows that an attempt before
has stored are not stored again if they come in the same order; whatever happens, no row is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, NamedTuple

import pyarrow as pa

import dmq
from dmq.client.client import Client
from dmq.client.routes import Route
from dmq.clock import SystemClock
from dmq.errors import MessageTooLarge
from dmq.model import MessageId
from dmq.pipeline.blocks import blocks
from dmq.pipeline.pieces import Encoder, Place, runs
from dmq.pipeline.resuming import Course, Numbered, Writer, courses
from dmq.pipeline.sending import LaneSender
from dmq.pipeline.sink_options import SinkOptions
from dmq.protocol import Command, decode_response, pack_batch, unpack_records
from dmq.protocol.admin import TopicDescribe
from dmq.protocol.producing import Produce, ProduceFlag, ProducerState, ProducerStates, ProducerStatesReply
from dmq.protocol.reading import Find
from dmq.records import Compressor, RecordView

__all__ = ["Written", "write_rows"]

_HEADER_BYTES: Final = 4096


class Written(NamedTuple):
    """What became of a partition's rows."""

    rows: int
    skipped: int  # of them, stored by an attempt before


def write_rows(batches: Iterable[pa.RecordBatch], writer: Writer, options: SinkOptions) -> Written:
    """Write rows, and wait until they are stored.

    Parameters:
        batches: with the columns of `dmq.pipeline.sink_options.COLUMNS`.
        writer: who writes.

    Raises:
        DMQError: not all are stored; an attempt with the same writer goes on from there.
    """
    with dmq.connect(options.url, app=options.app, timeout=options.timeout) as client:
        return _Partition(client, writer, options).write(batches)


class _Broker:
    """`Asking` over a client."""

    def __init__(self, client: Client, timeout: float) -> None:
        self._transport = client.transport
        self._timeout = timeout
        self._routes: dict[str, Route] = {}

    def route(self, topic: str) -> Route:
        route = self._routes.get(topic)
        if route is None:
            frame = self._transport.request(Command.TOPIC_DESCRIBE, TopicDescribe(topic), timeout=self._timeout)
            route = self._routes[topic] = Route.of(decode_response(frame).info.config, time.monotonic())
        return route

    def states(self, topic: str, producer_ids: list[int], is_delayed: bool) -> list[ProducerState]:
        asked = ProducerStates(topic, producer_ids, is_delayed)
        reply: ProducerStatesReply = decode_response(
            self._transport.request(Command.PRODUCER_STATES, asked, timeout=self._timeout)
        )
        return reply.producers

    def mark(self, producer_id: int, sequence: int) -> int | None:
        asked = Find(message_id=MessageId(producer_id, sequence).to_bytes(), max_messages=1)
        frame = self._transport.request(Command.FIND, asked, timeout=self._timeout)
        lengths, data = unpack_records(frame.body, len(decode_response(frame).found))
        return RecordView(data, 0, int(lengths[0])).attributes.mark if len(lengths) else None


class _Partition:
    """One call of `write_rows`."""

    def __init__(self, client: Client, writer: Writer, options: SinkOptions) -> None:
        self._client = client
        self._writer = writer
        self._options = options
        self._broker = _Broker(client, options.timeout)
        self._sender = LaneSender(client.transport, options.timeout)
        compressor = None if options.compression == "none" else Compressor(options.compression)  # type: ignore[arg-type]
        self._encoder = Encoder(options.app, options.ordered, compressor)
        self._clock = SystemClock()
        self._courses: dict[Place, Course] = {}

    def write(self, batches: Iterable[pa.RecordBatch]) -> Written:
        options, count = self._options, 0
        for block in blocks(batches, options.topic, ordered=options.ordered):
            count += block.rows.num_rows
            for place, rows in runs(block, self._writer.partition, options.topic, options.ordered, self._broker.route):
                for numbered in self._course(place).take(rows):
                    self._send(place, numbered)
        for place, course in self._courses.items():
            for numbered in course.ended():
                self._send(place, numbered)
        self._sender.drain()
        return Written(count, sum(course.skipped for course in self._courses.values()))

    def _course(self, place: Place) -> Course:
        course = self._courses.get(place)
        if course is None:
            queues = 1 if place.is_delayed else self._broker.route(place.topic).queues
            places = [place._replace(queue=queue) for queue in range(queues)]
            self._courses |= courses(self._writer, places, self._broker)
            course = self._courses[place]
        return course

    def _send(self, place: Place, numbered: Numbered) -> None:
        limits = self._client.transport.connection().limits
        made, dues = self._encoder.encode(
            place, numbered.rows, numbered.mark, self._clock.now_ms(), limits.body_bytes_max
        )
        body = pack_batch(made, dues)
        if sum(map(len, body)) + _HEADER_BYTES > limits.frame_bytes_max:
            raise MessageTooLarge(
                f"{made.count} rows for topic {place.topic!r} take more than the {limits.frame_bytes_max} bytes of a "
                "request: send smaller headers, or raise broker.frame_bytes_max"
            )
        flags = (ProduceFlag.NAMED if self._writer.is_named else 0) | (ProduceFlag.DUES if dues else 0)
        header = Produce(
            place.topic, place.queue, made.count, len(made.hashes), numbered.producer_id, numbered.epoch,
            numbered.first_sequence, self._options.durability, flags,
        )  # fmt: skip
        self._sender.send(header, body)
