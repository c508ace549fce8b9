"""A stand-in for the Broker: it writes batches, answers and hands out as a leader's Broker must."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from dmq.errors import Damaged, DMQError, NotLeader, StorageError, StoreFailed
from dmq.model import Durability, Message, TopicConfig
from dmq.records import encode_batch
from dmq.shard.service import Leadership
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.store import MessageStore
from tests.fault.shard.checker import QUEUES, TOPIC, Checker

__all__ = ["Request", "SimulatedService"]

T = TypeVar("T")
_UPKEEP_SECONDS = 1.0


class Request(NamedTuple):
    """A batch of one producer."""

    producer: int
    queue: int
    first_sequence: int
    bodies: tuple[bytes, ...]
    durability: Durability


class _Waiting(NamedTuple):
    unit_end: int
    request: Request
    reply: Callable[[Any], None]


class SimulatedService:
    """See `dmq.shard.service.Service`; of one process.

    Parameters:
        on_disk: runs what blocks.
        fail: the store has failed: the process ends.

    Attributes:
        is_excepted: the clocks of its machine stood still since it began to lead; see `Checker`.
    """

    def __init__(
        self,
        name: str,
        checker: Checker,
        on_disk: Callable[[Callable[[], Any]], Awaitable[Any]],
        *,
        fail: Callable[[str], None],
    ) -> None:
        self._name = name
        self._checker = checker
        self._on_disk = on_disk
        self.is_excepted = False
        self._fail = fail
        self.store: MessageStore | None = None
        self.leadership: Leadership | None = None
        self._is_held = False
        self._waiting: list[_Waiting] = []
        self._dirty = asyncio.Event()
        self._clean = asyncio.Event()
        self._over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # --- Service ----------------------------------------------------------------------------------------------------

    async def begin(self, store: MessageStore, leadership: Leadership) -> None:
        self.store, self.leadership = store, leadership
        self._is_held = self.is_excepted = False
        self._waiting = []
        self._dirty.clear()
        self._over.clear()
        self._checker.began(self._name, store)
        self._tasks = [
            asyncio.create_task(self._keep_flushing(store, leadership)),
            asyncio.create_task(self._keep_up(store)),
        ]

    def committed(self) -> None:
        store = self.store
        if store is not None:
            self._checker.advanced(self._name, store)
            self._answer()

    async def hold(self) -> None:
        self._is_held = True
        while self.store is not None and self.store.queries.flushed < self.store.queries.end:
            self._clean.clear()
            self._dirty.set()
            await self._clean.wait()

    def resume(self) -> None:
        self._is_held = False

    async def drop(self) -> None:
        self.store = self.leadership = None
        for waiting in self._waiting:
            waiting.reply(None)
        self._waiting = []
        self._dirty.set()
        self._clean.set()
        self._over.set()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            await task

    # --- clients, on the loop -----------------------------------------------------------------------------------------

    def produce(self, request: Request, reply: Callable[[Any], None]) -> None:
        """A batch arrives; `reply` gets True, an error, or None where the connection ends."""
        store, leadership = self.store, self.leadership
        try:
            if store is None or leadership is None or self._is_held:
                raise NotLeader("this member does not lead: ask another one")
            leadership.check_serving()
            leadership.check_writable()
            if not self._has_topic(store, leadership) or store.wants_quiet:
                raise NotLeader("this member is not ready: ask again")
            (placement,) = store.append([_batch(request)], request.durability)
        except StorageError as error:
            self._fail(f"a write failed: {error!r}")
            return
        except DMQError as error:
            reply(error)
            return
        leadership.wrote()
        self._dirty.set()
        if request.durability is Durability.STORED and leadership.may_serve():
            self._checker.served(self._name, leadership.epoch, is_excepted=self.is_excepted)
            reply(True)
            return
        self._waiting.append(_Waiting(placement.unit_end, request, reply))
        self._answer()

    def consume(self, queue: int, offset: int, reply: Callable[[Any], None]) -> None:
        """Hand out what there is from an offset on; `reply` gets the next offset, or an error."""
        store, leadership = self.store, self.leadership
        if store is None or leadership is None or not leadership.may_serve():
            reply(NotLeader("this member does not lead: ask another one"))
            return
        self._checker.served(self._name, leadership.epoch, is_excepted=self.is_excepted)
        if store.queries.find_topic(TOPIC) is None:
            reply(offset)
            return
        first, end = store.queries.bounds(TOPIC, queue)
        offset = max(first, offset)
        if offset < end:
            try:
                found = store.queries.read(TOPIC, queue, offset, max_messages=20)
            except Damaged as error:
                reply(error)
                return
            for record in found.records():
                self._checker.handed_out(self._name, queue, offset, bytes(record.body))
                offset += 1
        reply(offset)

    def _has_topic(self, store: MessageStore, leadership: Leadership) -> bool:
        if store.queries.find_topic(TOPIC) is not None:
            return True
        if store.queries.visible == store.queries.end and not store.wants_quiet:
            store.append([store.creation(TOPIC, TopicConfig(queues=QUEUES))])
            leadership.wrote()
            self._dirty.set()
        return False

    def _answer(self) -> None:
        store, leadership = self.store, self.leadership
        if store is None or leadership is None or not self._waiting:
            return
        visible = store.queries.visible
        ready = [one for one in self._waiting if one.unit_end <= visible]
        if not ready or not leadership.may_serve():
            return
        self._waiting = [one for one in self._waiting if one.unit_end > visible]
        for one in ready:
            if one.request.durability is not Durability.STORED:
                self._checker.confirmed(self._name, one.request.queue, one.request.bodies[0])
            one.reply(True)

    # --- the disk -----------------------------------------------------------------------------------------------------

    async def _keep_flushing(self, store: MessageStore, leadership: Leadership) -> None:
        while self.store is store:
            await self._dirty.wait()
            self._dirty.clear()
            while self.store is store and store.queries.flushed < store.queries.end:
                ticket = store.begin_flush()
                failure: StorageError | None = None
                try:
                    await self._on_disk(ticket.run)
                except StorageError as error:
                    failure = error
                try:
                    store.finish_flush(ticket, failure)
                except StoreFailed as error:
                    self._fail(f"a flush failed: {error!r}")
                    return
                if self.store is store:
                    leadership.flushed()
                    self._checker.advanced(self._name, store)
                    self._answer()
            self._clean.set()

    async def _keep_up(self, store: MessageStore) -> None:
        while self.store is store:
            self._answer()
            try:
                if store.wants_quiet or store.queries.visible == store.queries.end:
                    store.retain(2)
                    if store.queries.flushed < store.queries.end:
                        assert self.leadership is not None
                        self.leadership.wrote()
                        self._dirty.set()
                if store.checkpoint_due and (plan := store.begin_checkpoint()) is not None:
                    failure: BaseException | None = None
                    try:
                        await self._on_disk(plan.write)
                    except DMQError as error:
                        failure = error
                    store.finish_checkpoint(plan, failure)
            except StorageError as error:
                self._fail(f"upkeep failed: {error!r}")
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_UPKEEP_SECONDS):
                    await self._over.wait()


def _batch(request: Request) -> Batch:
    encoded = encode_batch(TOPIC, "app", [Message(body) for body in request.bodies], sent_at_ms=1_700_000_000_000)
    return Batch(
        topic=TOPIC,
        queue=request.queue,
        data=encoded.data,
        lengths=encoded.lengths,
        hash_index=encoded.hash_index,
        hashes=encoded.hashes,
        producer_id=request.producer,
        first_sequence=request.first_sequence,
    )
