"""What senders see of connections: the seams between deciding and doing. Both clients bring their own.

What always holds: `submit` either raises, and nothing was sent, or calls `on_answer` exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dmq.client.session import OnAnswer, Pending
from dmq.client.url import Address
from dmq.protocol import Buffer, Header
from dmq.protocol.session import Limits

__all__ = ["Lines", "Link"]


class Link(Protocol):
    """A connection, as far as senders see it."""

    @property
    def address(self) -> Address: ...

    @property
    def limits(self) -> Limits: ...

    def submit(
        self,
        command: int,
        header: Header,
        body: Sequence[Buffer] = ...,
        *,
        on_answer: OnAnswer,
        flags: int = ...,
        attended: bool = ...,
    ) -> Pending: ...

    def tell(self, command: int, header: Header, body: Sequence[Buffer] = ...) -> None: ...

    def forget(self, pending: Pending) -> bool: ...


class Lines(Protocol):
    """All connections of a client, as far as senders see them."""

    def current(self) -> Link | None:
        """The link in use; None while there is none."""
        ...

    def has_other(self, link: Link) -> bool:
        """Whether another broker than this link's could be asked."""
        ...

    def find_other(self, link: Link, found: Callable[[Link | None], None]) -> None:
        """Have `found` called with a link to another broker, or None if none answers. Does not block."""
        ...

    def call_later(self, seconds: float, function: Callable[[], None]) -> None: ...

    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a user's callback called where it can block nobody."""
        ...
