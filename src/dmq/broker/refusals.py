"""Refusals: what of a request did not work, while the rest did.

Pure code. An answer names every refusal with its status; texts are said as long as there is room for them, since a
request may name many things and the head of a frame is bounded.

What always holds: texts of one answer take at most `TEXT_BYTES_MAX`, so that with as many refusals as a list may have
the answer fits into the head of a frame.
"""

from __future__ import annotations

from typing import Final

from dmq.errors import DMQError
from dmq.protocol.status import status_of

__all__ = ["TEXT_BYTES_MAX", "RefusalTexts"]

TEXT_BYTES_MAX: Final = 64 << 10


class RefusalTexts:
    """The texts of the refusals of one answer."""

    def __init__(self) -> None:
        self._left = TEXT_BYTES_MAX

    def of(self, error: DMQError) -> tuple[int, str]:
        """Status and text of an error; no text when there was much to say before."""
        status, header = status_of(error)
        self._left -= len(header.message.encode())
        return status, header.message if self._left >= 0 else ""
