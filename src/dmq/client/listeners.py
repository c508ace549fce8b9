"""The listeners of a client: told when the connection breaks and when it is back (A-09).

What always holds: the last one set wins, also for events that were on their way when it was set; a client without
listeners works the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from dmq.client.arguments import check_function
from dmq.errors import DMQError

__all__ = ["Listeners", "OnEvent", "OnException"]

OnException: TypeAlias = Callable[[DMQError], Any]
OnEvent: TypeAlias = Callable[[], Any]


class Listeners:
    """Three places for a function of the user."""

    __slots__ = ("on_exception", "on_interrupted", "on_resumed")

    def __init__(
        self,
        on_exception: OnException | None = None,
        on_interrupted: OnEvent | None = None,
        on_resumed: OnEvent | None = None,
    ) -> None:
        self.on_exception = check_function("on_exception", on_exception)
        self.on_interrupted = check_function("on_interrupted", on_interrupted)
        self.on_resumed = check_function("on_resumed", on_resumed)

    def exception(self, reason: DMQError) -> Any:
        """The connection broke, for this reason. What the listener returns is awaited on an event loop."""
        return None if self.on_exception is None else self.on_exception(reason)

    def interrupted(self) -> Any:
        """There is no connection now."""
        return None if self.on_interrupted is None else self.on_interrupted()

    def resumed(self) -> Any:
        """There is one again, and everything goes on."""
        return None if self.on_resumed is None else self.on_resumed()
