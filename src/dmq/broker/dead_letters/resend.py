"""Resending dead letters: each is sent first and marked then, under the id it always had.

A letter of a group goes to that group alone, through its retry topic, with as many attempts as a new message gets. One
that never was stored goes to its topic.

Before a letter is sent the broker claims it in the database, so that no other broker sends it too. A claim that is
found later, since the broker died or the database went away in between, is settled by what the journal says: if the
message is there it is marked, else it waits again.

What always holds: a letter that is resent is delivered once for each time somebody asked for it, wherever the broker
dies; each one asked for has an outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.dead_letters.letter_thread import LetterThread
from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import DMQError, UnknownMessage, UnknownTopic, Unsupported
from dmq.event_log import EventLog
from dmq.model import SYSTEM_PREFIX, TopicConfig, parse_broadcast_name, retry_topic_name
from dmq.records import DeadReason, business_hash, id_hash, key_hash, moved_record
from dmq.records.attributes import Attributes
from dmq.storage.journal.unit_draft import Batch
from dmq.token_bucket import TokenBucket

if TYPE_CHECKING:
    from dmq.deadletters.letter import DeadLetter

__all__ = ["Resend"]

log = EventLog(__name__)

_TOGETHER: Final = 100


class Resend:
    """The resends of one broker.

    Parameters:
        bucket: how many are sent in a second.
        name: the broker's.
    """

    def __init__(
        self,
        journal: Journal,
        runtime: Runtime,
        catalog: Catalog,
        thread: LetterThread,
        *,
        bucket: TokenBucket,
        name: str,
    ) -> None:
        self._store = journal.store
        self._queries = journal.queries
        self._writer = journal.writer
        self._reads = journal.reads
        self._runtime = runtime
        self._catalog = catalog
        self._thread = thread
        self._bucket = bucket
        # What our claims say; with the journal's id, since a name may be used twice.
        self._name = f"{name[:200]}/{journal.queries.journal_id:016x}"
        self._under_way: set[int] = set()
        self.resent = 0
        self.deleted = 0

    async def resend(self, numbers: Sequence[int], who: str) -> dict[int, DMQError | None]:
        """Send letters again.

        Parameters:
            who: the client that asks, for the record.

        Returns:
            For each what went wrong, None if nothing did.

        Raises:
            DatabaseDown: the database cannot be used; those that were sent already are marked when it is back.
        """
        self._runtime.readiness.check_running()
        outcomes: dict[int, DMQError | None] = {}
        for number in numbers:
            if number in self._under_way:
                outcomes[number] = UnknownMessage(f"letter {number} is being resent right now: look again")
        left = mine = [number for number in dict.fromkeys(numbers) if number not in outcomes]
        self._under_way.update(mine)
        try:
            while left:
                together, left = left[:_TOGETHER], left[_TOGETHER:]
                await self._keep_pace(len(together))
                skipped = await self._resend(together, who, outcomes)
                left = skipped + left
        finally:
            self._under_way.difference_update(mine)
        return outcomes

    async def delete(self, numbers: Sequence[int], who: str) -> dict[int, DMQError | None]:
        """Mark letters deleted; as `resend`."""
        await self._keep_pace(len(numbers))
        at_ms = self._runtime.clock.wall.now_ms()
        problems = await self._thread.call(lambda store: store.delete(numbers, who, at_ms))
        self.deleted += len(set(numbers)) - len(problems)
        return {n: UnknownMessage(problems[n]) if n in problems else None for n in numbers}

    async def _keep_pace(self, count: int) -> None:
        seconds = self._bucket.wait(count, self._runtime.clock.wall.monotonic())
        if seconds:
            await asyncio.sleep(seconds)

    async def _resend(self, numbers: list[int], who: str, outcomes: dict[int, DMQError | None]) -> list[int]:
        """Send some; returns those that have to wait for the next round."""
        me = self._name
        claimed = await self._thread.call(lambda store: store.claim(numbers, me, who))
        outcomes |= {number: UnknownMessage(problem) for number, problem in claimed.problems.items()}
        results = await asyncio.gather(*(self._send(letter) for letter in claimed.letters), return_exceptions=True)
        sent: list[int] = []
        unsent: list[int] = []
        for letter, result in zip(claimed.letters, results, strict=True):
            if isinstance(result, DMQError):
                outcomes[letter.number] = result
                unsent.append(letter.number)
            elif result is not None:
                raise result  # a defect; what was claimed is settled by the next look at the journal
            else:
                outcomes[letter.number] = None
                sent.append(letter.number)
        at_ms = self._runtime.clock.wall.now_ms()
        if sent:
            await self._thread.call(lambda store: store.mark_resent(sent, me, at_ms))
            self.resent += len(sent)
        if unsent:
            await self._thread.call(lambda store: store.release(unsent, me))
        return claimed.left

    async def _send(self, letter: DeadLetter) -> None:
        """Send one, unless the journal has it: then a claim of ours from before stood in the database."""
        if letter.claimed_by is not None and await self._is_sent(letter):
            return
        await self._writer.write([await self._batch(letter)])

    async def _batch(self, letter: DeadLetter) -> Batch:
        from dmq.deadletters.letter import record_of

        if letter.reason == DeadReason.CORRUPT.name:
            raise Unsupported(
                f"letter {letter.number} was stored damaged, and nobody knows what its sender wrote: have it sent anew "
                "by the program it came from; what is left of it is in the letter"
            )
        topic, queue = await self._target(letter)
        record = record_of(letter)
        # `attempts_before` is what a look at the journal recognises this sending by.
        raw = moved_record(
            record,
            topic,
            sent_at_ms=self._runtime.clock.wall.now_ms(),
            says=Attributes(
                attempt=0 if letter.group else None, group=letter.group or None, attempts_before=letter.attempts
            ),
        )
        hashes = [id_hash(letter.message_id)]
        if record.key is not None:
            hashes.append(key_hash(record.key))
        return Batch(
            topic=topic,
            queue=queue,
            data=raw,
            lengths=[len(raw)],
            hash_index=[0] * len(hashes),
            hashes=hashes,
            moved=True,
        )

    async def _target(self, letter: DeadLetter) -> tuple[str, int]:
        topic = self._queries.find_topic(letter.topic)
        if topic is None:
            raise UnknownTopic(
                f"topic {letter.topic!r} of letter {letter.number} is gone: create it, or delete the letter"
            )
        queues = topic.config.queues
        if not letter.group:
            if topic.config.priority:
                return topic.name, min(letter.priority, queues - 1)
            if letter.business_id:
                return topic.name, business_hash(letter.business_id) % queues
            return topic.name, self._catalog.choose_queue(topic)
        if self._is_broadcast(letter.group, topic.id):
            raise Unsupported(
                f"letter {letter.number} is of the broadcast group {letter.group!r}, whose members have no retry "
                "topic: send its body anew"
            )
        name = retry_topic_name(letter.group, topic.id)
        await self._catalog.see_to_topic(name, TopicConfig(queues=queues, carry_for=letter.group))
        return name, min(letter.queue or 0, queues - 1)

    def _is_broadcast(self, group: str, topic_id: int) -> bool:
        queries = self._queries
        if any(key[0] == topic_id for key in queries.positions_of(group)):
            return False
        names = (name for name in queries.groups() if name.startswith(SYSTEM_PREFIX))
        return any((parts := parse_broadcast_name(name)) is not None and parts[0] == group for name in names)

    # --- claims of before -------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Settle claims of ours that nobody is at: those that were sent are marked, the others wait again."""
        me = self._name
        while True:
            claims = await self._thread.call(lambda store: store.claims(me))
            idle = [letter for letter in claims if letter.number not in self._under_way]
            if not idle:
                return
            sent: list[int] = []
            unsent: list[int] = []
            for letter in idle:
                (sent if await self._is_sent(letter) else unsent).append(letter.number)
            at_ms = self._runtime.clock.wall.now_ms()
            await self._thread.call(lambda store: store.mark_resent(sent, me, at_ms))  # noqa: B023
            await self._thread.call(lambda store: store.release(unsent, me))  # noqa: B023
            log.info("claims of dead letters settled", sent=len(sent), unsent=len(unsent))

    async def _is_sent(self, letter: DeadLetter) -> bool:
        """Whether the journal has what a resend of this letter writes."""
        queries = self._queries
        found = await self._reads.ask(lambda: queries.find(message_id=letter.message_id))
        for place in found:
            said = place.record.attributes
            if place.record.moved and said.attempts_before == letter.attempts and (said.group or "") == letter.group:
                return True
        return False
