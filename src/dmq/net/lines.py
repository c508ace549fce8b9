"""Lines that a person types into `telnet` or `nc`. Pure code: bytes in, lines and replies out.

A telnet client negotiates options before it sends a line; all are declined, so it stays in its plain line mode. A line
ends with CR LF, CR NUL, CR or LF.

What always holds: no more than one line of `bytes_max` is kept; what is in a line is printable; a reply is never longer
than what it answers.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

__all__ = ["LineReader", "LineTooLong"]

_IAC: Final = 255
_DONT, _DO, _WONT, _WILL = 254, 253, 252, 251
_SB, _SE = 250, 240
_CR, _LF, _NUL = 13, 10, 0
_ERASE: Final = frozenset((8, 127))
_END_OF_INPUT: Final = 4  # Ctrl-D, where the terminal sends characters


class LineTooLong(Exception):
    """The peer does not send lines."""


class _State(Enum):
    DATA = 0
    COMMAND = 1  # behind an IAC
    OPTION = 2  # behind WILL, WONT, DO or DONT
    SUB = 3  # within a subnegotiation, which says nothing to us
    SUB_COMMAND = 4


class LineReader:
    def __init__(self, bytes_max: int = 512) -> None:
        self._bytes_max = bytes_max
        self._line = bytearray()
        self._state = _State.DATA
        self._verb = 0
        self._after_cr = False
        self.is_over = False  # an end of input was typed

    def feed(self, data: bytes) -> tuple[list[str], bytes]:
        """The lines that are whole now, and what to send back.

        Raises:
            LineTooLong: one has no end.
        """
        lines: list[str] = []
        replies = bytearray()
        for byte in data:
            match self._state:
                case _State.DATA:
                    self._take(byte, lines)
                case _State.COMMAND:
                    self._command(byte)
                case _State.OPTION:
                    self._state = _State.DATA
                    if self._verb in (_DO, _WILL):
                        replies += bytes((_IAC, _WONT if self._verb == _DO else _DONT, byte))
                case _State.SUB:
                    if byte == _IAC:
                        self._state = _State.SUB_COMMAND
                case _State.SUB_COMMAND:
                    self._state = _State.DATA if byte == _SE else _State.SUB
        return lines, bytes(replies)

    def _command(self, byte: int) -> None:
        self._state = _State.DATA
        if byte in (_DO, _DONT, _WILL, _WONT):
            self._verb, self._state = byte, _State.OPTION
        elif byte == _SB:
            self._state = _State.SUB
        elif byte == _IAC:
            self._add(byte)

    def _take(self, byte: int, lines: list[str]) -> None:
        was_cr, self._after_cr = self._after_cr, byte == _CR
        if byte == _IAC:
            self._state = _State.COMMAND
        elif byte == _CR or (byte == _LF and not was_cr):
            lines.append("".join(char for char in self._line.decode("utf-8", "replace") if char.isprintable()))
            self._line.clear()
        elif byte in (_LF, _NUL):
            pass
        elif byte in _ERASE:
            del self._line[-1:]
        elif byte == _END_OF_INPUT:
            self.is_over = True
        else:
            self._add(byte)

    def _add(self, byte: int) -> None:
        if len(self._line) >= self._bytes_max:
            raise LineTooLong
        self._line.append(byte)
