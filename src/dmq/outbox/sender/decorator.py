"""`@sends_messages`: what a business method inserted goes out when it returns (T-08).

What always holds: a method that raises sends nothing by this way; the method's own result or error is what its caller
gets, whatever becomes of the messages. Works on functions and on coroutine functions, in threads and tasks alike.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from dmq.outbox.sender.commit_hook import Collected, collected_by

__all__ = ["sends_messages"]

P = ParamSpec("P")
T = TypeVar("T")


def sends_messages(method: Callable[P, T]) -> Callable[P, T]:
    """Send at once what the method has inserted with `MessageService.send`, once its transaction is committed.

    Sessions tell of their commits by themselves, so that messages also leave without it. It serves a method that works
    on a plain connection, or commits in a way that a session does not see, and it says what the method does.
    """
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            collected = Collected()
            token = collected_by.set(collected)
            try:
                result = await method(*args, **kwargs)
            finally:
                collected_by.reset(token)
            collected.tell()
            return result

        return cast("Callable[P, T]", run_async)

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        collected = Collected()
        token = collected_by.set(collected)
        try:
            result = method(*args, **kwargs)
        finally:
            collected_by.reset(token)
        collected.tell()
        return result

    return run
