from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dmq.records.check import BatchRules
from dmq.records.layout import Buffer, Stamp

SOURCES: str

def are_right(buffer: Buffer, lengths: Sequence[int] | npt.NDArray[np.integer[Any]], rules: BatchRules) -> bool: ...
def shape_of(kind: int) -> int: ...
def assemble_alike(
    bodies: list[bytes], keys: list[str | None], head: bytes, tail: bytes, crcs: list[int] | None
) -> tuple[bytearray, bytearray, bytearray, bytearray] | None: ...
def crcs_of(bodies: list[bytes]) -> list[int]: ...
def plain_crcs_of(bodies: list[bytes]) -> list[tuple[int, int]]: ...
def stamp_run(
    buffer: bytearray | memoryview,
    at: int,
    lengths: Sequence[int] | npt.NDArray[np.integer[Any]],
    journal_offset: int,
    stamp: Stamp,
) -> bytearray: ...
