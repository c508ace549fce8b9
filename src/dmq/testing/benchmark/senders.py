"""Many connections with one message under way on each: the load behind `dmq bench produce --connections`.

It runs as a process of its own, `python -m dmq.testing.benchmark.senders`, takes its task from stdin and says what
came of it on stdout. Our client is left out, so that the broker is measured and not a hundred clients in one process:
sockets, epoll, and frames as `dmq.protocol` and `dmq.records` make them.

What always holds: every connection says hello first; each has one request under way; all take from one pile, so that
who is served more often gets through more; every answer is decoded, and one that is not a success, not to the question
asked, or a duplicate ends the run with an error. Records are encoded before the timed part; headers and frames are
made within it.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import subprocess
import sys
import time
from typing import IO, Final

import msgspec

from dmq.model import DURABILITIES, Message
from dmq.protocol.batch import pack_batch
from dmq.protocol.commands import Command, decode_response, request_head
from dmq.protocol.frame import Frame, FrameParser, seal_frame
from dmq.protocol.produce import Produce, ProduceReply
from dmq.protocol.session import FRAME_CRC, Hello
from dmq.records import ANY_QUEUE, encode_batch
from dmq.testing.benchmark.benchmark import APP, Load
from dmq.testing.processes import read_line

__all__ = ["Outcome", "Senders", "Task"]

_RECEIVE_BYTES: Final = 64 * 1024
_ANSWER_SECONDS_MAX: Final = 60.0


class Task(msgspec.Struct, frozen=True):
    """What is to be sent, and where."""

    host: str
    port: int
    topic: str
    connections: int
    load: Load


class Outcome(msgspec.Struct, frozen=True):
    """What came of it: seconds and CPU seconds of the timed part, and the messages of each connection."""

    seconds: float
    cpu: float
    counts: list[int]


class Senders:
    """The process; connected when this returns.

    Raises:
        RuntimeError: it could not connect, or an answer was wrong.
    """

    def __init__(self, task: Task) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dmq.testing.benchmark.senders"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            self._say(msgspec.json.encode(task))
            self._hear(b"ready")
        except BaseException:
            self.close()
            raise

    def run(self) -> Outcome:
        """The timed part."""
        self._say(b"go")
        return msgspec.json.decode(self._hear(b"{"), type=Outcome)

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()

    def _hear(self, start: bytes) -> bytes:
        assert self._process.stdout is not None
        line = (read_line(self._process.stdout, time.monotonic() + 600) or "").encode()
        if not line.startswith(start):
            raise RuntimeError(f"the senders ended: {line.decode().strip() or 'they did not say why'}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


# --- the process ------------------------------------------------------------------------------------------------------


class _Sender:
    """One connection."""

    __slots__ = ("count", "parser", "producer_id", "sequence", "sock")

    def __init__(self, host: str, port: int) -> None:
        self.sock = socket.create_connection((host, port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.parser = FrameParser()
        self.producer_id = secrets.randbits(63) | 1
        self.sequence = 0
        self.count = 0

    def hello(self) -> None:
        self.send(request_head(Command.HELLO, Hello(APP, features=[FRAME_CRC]), 1))
        frame = None
        while frame is None:
            frame = self.receive()
        decode_response(frame)

    def send(self, frame: bytes) -> None:
        """As a client of ours sends it, with its checksum. The socket blocks: a broker reads whatever it is sent."""
        (sealed,) = seal_frame(frame)
        self.sock.sendall(sealed)

    def receive(self) -> Frame | None:
        """The answer, if it is all there."""
        data = self.sock.recv(_RECEIVE_BYTES)
        if not data:
            raise RuntimeError("the broker hung up")
        frames = self.parser.feed(data)
        if len(frames) > 1:
            raise RuntimeError(f"one request got {len(frames)} answers")
        return frames[0] if frames else None


class _Run:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._durability = DURABILITIES[task.load.durability]
        self._senders = [_Sender(task.host, task.port) for _ in range(task.connections)]
        for sender in self._senders:
            sender.hello()
        now_ms = time.time_ns() // 1_000_000
        # A body of a PRODUCE for each message: lengths, then the record.
        self._pile = iter(
            [
                b"".join(pack_batch(encode_batch(task.topic, APP, [Message(body)], sent_at_ms=now_ms)))
                for body in task.load.bodies()
            ]
        )

    def run(self) -> Outcome:
        by_fd = {sender.sock.fileno(): sender for sender in self._senders}
        poll = select.epoll()
        for fd in by_fd:
            poll.register(fd, select.EPOLLIN)
        cpu, began = time.process_time(), time.perf_counter()
        busy = sum(map(self._send, self._senders))
        while busy:
            ready = poll.poll(_ANSWER_SECONDS_MAX)
            if not ready:
                raise RuntimeError(f"{busy} requests were not answered within {_ANSWER_SECONDS_MAX:g} s")
            for fd, _ in ready:
                sender = by_fd[fd]
                frame = sender.receive()
                if frame is not None:
                    self._check(sender, frame)
                    busy -= not self._send(sender)
        taken = time.perf_counter() - began
        return Outcome(taken, time.process_time() - cpu, [sender.count for sender in self._senders])

    def _send(self, sender: _Sender) -> bool:
        """Send the next message; whether there was one."""
        body = next(self._pile, None)
        if body is None:
            return False
        header = Produce(
            self._task.topic,
            ANY_QUEUE,
            count=1,
            keys=0,
            producer_id=sender.producer_id,
            producer_epoch=0,
            first_sequence=sender.sequence,
            durability=self._durability,
        )
        sender.sequence += 1
        sender.send(request_head(Command.PRODUCE, header, sender.sequence, len(body)) + body)
        return True

    def _check(self, sender: _Sender, frame: Frame) -> None:
        reply = decode_response(frame)
        if not isinstance(reply, ProduceReply) or frame.correlation != sender.sequence or reply.is_duplicate:
            raise RuntimeError(f"request {sender.sequence} was answered with {reply} to {frame.correlation}")
        sender.count += 1


def _main(source: IO[bytes]) -> None:
    run = _Run(msgspec.json.decode(source.readline(), type=Task))
    print("ready", flush=True)
    if source.readline():
        print(json.dumps(msgspec.to_builtins(run.run())), flush=True)


if __name__ == "__main__":
    _main(sys.stdin.buffer)
