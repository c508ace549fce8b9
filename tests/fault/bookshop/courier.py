"""What happens to deliveries on their way: some come twice, some come late, some are refused.

Two means, because each reaches something else:

- `CourierProxy` works on the frames between one client and its broker. It holds pushes back while later ones pass,
  repeats pushes, and can refuse everything that is produced to one topic. A push that comes twice under one lease is
  taken for what it is by the client, so this proves the client and not the inbox.
- `Repeater` sends messages of a topic once more as they are, with their send ids: two messages, as a relay leaves them
  that died between send and mark. These reach the consumers.

What always holds: every fifth delivery is repeated and every twentieth is late, counted, not drawn by lot.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Final, Self

import dmq
from dmq.errors import NotAllowed
from dmq.protocol import Command
from dmq.protocol.commands import error_frame
from dmq.protocol.frame import HEAD, HEAD_BYTES, LENGTH_BYTES, is_sealed, seal_frame
from dmq.testing.proxy import ChaosProxy, _Line

TWICE_EVERY: Final = 5
LATE_EVERY: Final = 20
LATE_SECONDS: Final = 1.0
REPEATED: Final = "test.repeated"
_REFUSAL: Final = NotAllowed("nobody produces here now: wait until the topic is restored")


class CourierProxy(ChaosProxy):
    """Delivers pushes twice or late, and refuses what is produced to one topic."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.pushes = 0
        self.twice = 0
        self.late = 0
        self.refused = 0
        self._writing = threading.Lock()  # pushes that are late and refusals come from other threads
        self.cut_off = b""
        """The name of a topic to which nothing gets through, if not empty."""
        super().__init__(target)

    def _carry(self, line: _Line, source: socket.socket, sink: socket.socket, may_go: threading.Event) -> None:
        timers: list[threading.Timer] = []

        def send(frame: bytes, to: socket.socket = sink) -> None:
            with contextlib.suppress(OSError), self._writing if to is line.client else contextlib.nullcontext():
                to.sendall(frame)

        stream = source.makefile("rb")
        try:
            while head := stream.read(HEAD_BYTES):
                length, _, _, command, _, _, correlation, _ = HEAD.unpack(head)
                frame = head + stream.read(length - (HEAD_BYTES - LENGTH_BYTES))
                if may_go is self._to_target:
                    if command == Command.PRODUCE and self.cut_off and self.cut_off in frame:
                        self.refused += 1
                        refusal = error_frame(_REFUSAL, command, correlation)
                        send(b"".join(seal_frame(refusal)) if is_sealed(frame) else refusal, source)
                        continue
                elif command == Command.CONSUMER_PUSH:
                    self.pushes += 1
                    if self.pushes % LATE_EVERY == 3:
                        self.late += 1
                        timers.append(threading.Timer(LATE_SECONDS, send, (frame,)))
                        timers[-1].start()
                        continue
                    if self.pushes % TWICE_EVERY == 1:
                        self.twice += 1
                        send(frame)
                send(frame)
        except (OSError, ValueError):
            pass  # one side is gone, so the other goes too
        finally:
            for timer in timers:
                timer.cancel()
            stream.close()
        line.cut()
        with self._state:
            is_last = line not in self._lines
            if not is_last:
                self._lines.remove(line)
        if is_last:
            line.close()


class Repeater:
    """Sends every fifth message of some topics once more."""

    def __init__(self, url: str, topics: list[str]) -> None:
        self._url = url
        self._ending = threading.Event()
        self.repeated = dict.fromkeys(topics, 0)
        self._threads = [threading.Thread(target=self._run, args=(topic,), name=topic) for topic in topics]

    def _run(self, topic: str) -> None:
        seen = 0
        while not self._ending.is_set():
            try:
                with dmq.connect(self._url, app="repeater") as client, client.consumer(topic, "repeater") as consumer:
                    producer = client.producer()
                    while not self._ending.is_set():
                        for message in (batch := consumer.pull(50, wait=0.5)):
                            if REPEATED in message.properties:
                                continue
                            seen += 1
                            if seen % TWICE_EVERY == 1:
                                self._again(producer, topic, message)
                        batch.ack()
            except dmq.DMQError:
                self._ending.wait(0.2)  # the broker was killed

    def _again(self, producer: dmq.Producer, topic: str, message: dmq.ReceivedMessage) -> None:
        producer.send(
            topic, message.body, key=message.key, tag=message.tag, properties={**message.properties, REPEATED: "1"}
        )
        self.repeated[topic] += 1

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
