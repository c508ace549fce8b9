from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dmq.model import Message
from dmq.protocol.frame import Whole
from dmq.records.check import BatchRules
from dmq.records.encoder import Shape
from dmq.records.layout import Buffer, Stamp
from dmq.storage.journal.unit import Row
from dmq.storage.journal.unit_writer import Lone, UnitHead

SOURCES: str

def are_right(
    buffer: Buffer, lengths: Sequence[int] | npt.NDArray[np.integer[Any]], rules: BatchRules, raw_size: int = 0
) -> bool: ...
def divide_columns(body: Buffer, count: int, keys: int) -> tuple[bytearray, bytearray, bytearray, int] | None: ...
def shape_of(kind: int) -> int: ...
def assemble_alike(
    bodies: list[bytes], keys: list[str | None], head: bytes, tail: bytes, runs: list[tuple[int, int]]
) -> tuple[bytearray, bytearray, bytearray, bytearray, bytes] | None: ...
def simple_size(body: object, key: object, body_bytes_max: int, key_max: int) -> int: ...
def sizes_of(bodies: list[bytes]) -> tuple[int, int, int]: ...
def plain_crcs_of(bodies: list[bytes]) -> list[tuple[int, int]]: ...
def open_records(
    buffer: bytes,
    starts: list[int],
    first: int,
    stop: int,
    expand: Callable[[int], bytes] | None,
    is_checked: bool,
) -> tuple[list[bytes], list[str | None]] | None: ...
def stamp_run(
    buffer: bytearray | memoryview,
    at: int,
    lengths: Sequence[int] | npt.NDArray[np.integer[Any]],
    journal_offset: int,
    stamp: Stamp,
    table_at: int = -1,
) -> tuple[bytearray, bytearray]: ...
def bind_message(kind: type[Message], priority: int) -> bool: ...
def plain_columns(messages: list[Message]) -> tuple[list[bytes], list[str | None], int] | None: ...
def lone_bytes(
    lones: list[Lone], rows: list[Row], head: UnitHead, version: int
) -> tuple[bytearray, int, list[int], list[int], list[int], list[int], list[int]]: ...
def lone_record(front: bytes, tail: bytes, sent_at_ms: int, body: bytes, key: bytes | None) -> tuple[bytes, int]: ...
def lone_frame(
    front: bytes, shape: Shape, body: bytes, key: bytes | None, numbers: tuple[int, int, int, int, int, int]
) -> bytes: ...
def lone_answer(data: bytes, correlation: int) -> tuple[int, int, int] | None: ...
def whole_request(buffer: Buffer, size: int) -> Whole | None: ...
def lone_request(
    whole: bytes, body_at: int
) -> tuple[tuple[str, int, int, int, int, int, int, int], bytes, int] | None: ...
