"""Messages on an event loop: as `dmq.client.consumer.message`, and what is said of one may be awaited.

What always holds: `ack`, `nack` and `reject` never wait: they may be awaited, and need not be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import TYPE_CHECKING, Any, Final, Generic

from dmq.client.consumer.message import Batch, ReceivedMessage, T

__all__ = ["DONE", "AioBatch", "AioMessage", "OpenedAioMessage"]


class _Done:
    """Something to await that is done already."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


DONE: Final = _Done()


class AioMessage(ReceivedMessage[T], Generic[T], eq=False, gc=False):
    """A message on an event loop."""

    def ack(self) -> Awaitable[None]:
        super().ack()
        return DONE

    def nack(self, delay: float | None = None, reason: str = "") -> Awaitable[None]:
        super().nack(delay, reason)
        return DONE

    def reject(self, reason: str = "") -> Awaitable[None]:
        super().reject(reason)
        return DONE


class OpenedAioMessage(AioMessage[Any], eq=False, gc=False):
    """A message whose body and key were taken out with those of others."""

    body: Any
    key: str | None


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    M = TypeVar("M", bound="AioMessage[Any]", default="AioMessage[Any]")
else:
    from typing import TypeVar

    M = TypeVar("M", bound=AioMessage)


class AioBatch(Batch[M], Generic[M]):
    """Messages that were pulled together."""

    __slots__ = ()

    def ack(self) -> Awaitable[None]:
        super().ack()
        return DONE

    def nack(self, delay: float | None = None, reason: str = "") -> Awaitable[None]:
        super().nack(delay, reason)
        return DONE
