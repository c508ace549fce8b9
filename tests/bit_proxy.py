"""A proxy that turns bits: what a bad cable, network card or memory module does to frames on their way.

What always holds: a frame that was chosen has exactly one other bit, all others pass as they are; the same seed and the
same frames give the same bits; what was turned is told in `turned`.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple, TypeAlias

from dmq.protocol.frame import HEAD, HEAD_BYTES, LENGTH_BYTES
from dmq.testing.proxy import ChaosProxy

__all__ = ["BitProxy", "Passage", "TurnedBit", "some_of"]

_CHUNK_BYTES: Final = 1 << 16


class Passage(NamedTuple):
    """A frame on its way."""

    is_to_broker: bool
    kind: int
    command: int
    frame: bytes


class TurnedBit(NamedTuple):
    """What was done to a frame."""

    is_to_broker: bool
    kind: int
    command: int
    bit: int
    frame_bytes: int


Choose: TypeAlias = Callable[[Passage, random.Random], int | None]


def some_of(commands: Collection[int], share: float, *, is_to_broker: bool, first_bit: int = 0) -> Choose:
    """Turn a random bit, from one on, in a share of the frames of some commands that go one way."""

    def choose(passage: Passage, rng: random.Random) -> int | None:
        if passage.is_to_broker != is_to_broker or passage.command not in commands or rng.random() >= share:
            return None
        return rng.randrange(first_bit, len(passage.frame) * 8)

    return choose


class BitProxy(ChaosProxy):
    """Carries frames between clients and a broker, and turns a bit in those that `choose` chooses.

    Parameters:
        target: host and port of the broker.
        seed: of the random numbers that `choose` is given.

    Attributes:
        choose: which bit of a frame to turn, counted from the lowest of its first byte; None turns none.
        turned: what was turned so far.
    """

    def __init__(self, target: tuple[str, int], *, seed: int = 1) -> None:
        self.choose: Choose | None = None
        self.turned: list[TurnedBit] = []
        self._rng = random.Random(seed)
        self._choosing = threading.Lock()
        super().__init__(target)

    def _pieces(self, source: socket.socket, is_to_target: bool) -> Iterator[bytes]:
        waiting = b""
        while data := source.recv(_CHUNK_BYTES):
            waiting += data
            frames: list[bytes] = []
            while len(waiting) >= HEAD_BYTES:
                size = LENGTH_BYTES + int.from_bytes(waiting[:LENGTH_BYTES], "big")
                if len(waiting) < size:
                    break
                frame, waiting = waiting[:size], waiting[size:]
                frames.append(self._turn(frame, is_to_target))
            if frames:
                yield b"".join(frames)

    def _turn(self, frame: bytes, is_to_broker: bool) -> bytes:
        choose = self.choose
        if choose is None:
            return frame
        _, _, kind, command, _, _, _, _ = HEAD.unpack_from(frame)
        with self._choosing:
            bit = choose(Passage(is_to_broker, kind, command, frame), self._rng)
            if bit is None:
                return frame
            self.turned.append(TurnedBit(is_to_broker, kind, command, bit, len(frame)))
        turned = bytearray(frame)
        turned[bit // 8] ^= 1 << bit % 8
        return bytes(turned)
