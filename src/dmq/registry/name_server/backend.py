"""What a name server serves: a registry in its database, or one that is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from dmq.protocol.header import Header
from dmq.registry.registry import Entry

__all__ = ["Backend", "News"]


class News(NamedTuple):
    """What has changed since a number.

    Attributes:
        is_all: anything may have; then there are no paths.
    """

    seq: int
    paths: tuple[str, ...]
    is_all: bool


class Backend(Protocol):
    """All methods belong to the name server's event loop."""

    @property
    def name(self) -> str:
        """Where the registry is, for logs."""
        ...

    @property
    def root(self) -> str:
        """The path below which the cluster is."""
        ...

    @property
    def commands(self) -> frozenset[int]:
        """What is served."""
        ...

    @property
    def meanings(self) -> Mapping[str, str]:
        """Of the figures."""
        ...

    @property
    def trouble(self) -> str:
        """Why the registry cannot be served; empty if it can."""
        ...

    async def start(self, tell: Callable[[News], None]) -> None:
        """
        Parameters:
            tell: hears what has changed.

        Raises:
            DMQError: it cannot be served, and nothing is left open.
        """
        ...

    async def stop(self) -> None: ...

    def serve(self, command: int, asked: Any, answer: Callable[[Header | BaseException], None]) -> None:
        """Have a request carried out, one of `commands`; `answer` is called once, later.

        Raises:
            DMQError: it can never be.
        """
        ...

    async def read(self, path: str) -> Entry | None: ...

    async def children(self, path: str) -> list[Entry]: ...

    def figures(self) -> Mapping[str, float]: ...
