"""Batches: many messages in one transaction, for handlers that are quick.

The consumer rows of a batch are put with one statement and committed at one stroke with all that its handlers did, and
the results leave together; so a message costs little more than its business.

What always holds: as for the inbox. If one message of a batch fails, is refused, or is consumed elsewhere meanwhile,
nothing of the batch was kept, and its messages are consumed one by one; so a handler may run twice for a message, as
after any rollback, and counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from sqlalchemy.orm import Session, sessionmaker

from dmq.client.consumer.consumer import Consumer
from dmq.client.consumer.handler import Retry, judge, tell_failure
from dmq.client.consumer.message import Batch, ReceivedMessage
from dmq.client.producer.producer import Producer
from dmq.errors import DMQError, UnknownTopic
from dmq.event_log import EventLog
from dmq.model import Message
from dmq.outbox.inbox.consumption import Consumption, Rollback, check_active, result_message, settled
from dmq.outbox.inbox.recorder import Contended, Earlier, Recorder, run
from dmq.outbox.metrics import Counts
from dmq.outbox.states import BusinessState

__all__ = ["BatchInbox"]

log = EventLog(__name__)

Function: TypeAlias = Callable[[Session, ReceivedMessage], Any]
_WAIT_SECONDS: Final = 1.0


class OneByOne(Protocol):
    """An `Inbox`, which consumes messages one by one, as far as batches need it."""

    @property
    def sessions(self) -> sessionmaker[Session]: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def counts(self) -> Counts: ...
    @property
    def has_client(self) -> bool: ...
    @property
    def results(self) -> Producer: ...

    def begin(self, group: str) -> None: ...
    def open(self, message: ReceivedMessage) -> Consumption: ...
    def consume(self, message: ReceivedMessage, business: Callable[[Session], Any]) -> None: ...


class BatchInbox:
    """Consumes batches for an inbox.

    Parameters:
        inbox: consumes messages that cannot be consumed in a batch.
        function: of the business, called with a session and a message; as for `Inbox.consumes_messages`.
    """

    def __init__(self, inbox: OneByOne, function: Function) -> None:
        self._inbox = inbox
        self._function = function

    def run(self, consumer: Consumer, batch: int) -> None:
        """Pull and consume until the consumer is closed.

        Raises:
            DMQError: why there will be no more messages.
        """
        self._inbox.begin(consumer.group)
        try:
            while True:
                self.consume(consumer.pull(batch, _WAIT_SECONDS))
        except DMQError:
            if not consumer.is_closing:
                raise

    def consume(self, batch: Batch[ReceivedMessage]) -> None:
        """Consume and settle a batch."""
        messages = [*batch]  # a batch makes its messages anew whenever it is looked through
        taken = [self._inbox.open(message) for message in messages]
        # Strict sequences go one by one: each has to see the one before it.
        plain = [at for at, one in enumerate(taken) if not one.is_strict]
        done: set[int] = set()
        try:
            if plain:
                came_to = self._together([(messages[at], taken[at]) for at in plain])
                self._answer([(taken[at], came_to[taken[at].row.send_id]) for at in plain])
                done.update(plain)
        except Exception as error:
            if not isinstance(error, Rollback | Retry | Contended):
                log.info("a batch is consumed one by one", once_for=str(error), messages=len(plain), error=error)
        for at, message in enumerate(messages):
            if at not in done:
                self._alone(message)
        batch.ack()  # all that is not settled yet

    def _together(self, messages: Sequence[tuple[ReceivedMessage, Consumption]]) -> dict[str, Earlier]:
        """Consume all of them in one transaction; return what each came to, by send id."""
        inbox, recorder = self._inbox, self._inbox.recorder
        first: dict[str, tuple[ReceivedMessage, Consumption]] = {}
        for one in messages:
            first.setdefault(one[1].row.send_id, one)
        with inbox.sessions() as session, session.begin() as transaction:
            earlier = run(recorder.find_many([*first], messages[0][1].row.group), session.execute)
            new = {send_id: one for send_id, one in first.items() if send_id not in earlier}
            if new:
                run(recorder.put_many([taken.row for _, taken in new.values()]), session.execute)
            for message, _ in new.values():
                settled(self._function(session, message))
            check_active(transaction)
        for send_id, (_, taken) in new.items():
            earlier[send_id] = Earlier(BusinessState.SUCCESS, taken.row.consumer_id, "", taken.row.at_ms)
        inbox.counts.add("consumed", len(new))
        inbox.counts.add("duplicates", len(messages) - len(new))
        return earlier

    def _answer(self, said: Sequence[tuple[Consumption, Earlier]]) -> None:
        """Tell the senders, all at once."""
        results: dict[str, list[Message]] = {}
        for taken, earlier in said:
            if taken.result_to and self._inbox.has_client:
                topic, message = result_message(taken.row, taken.result_to, earlier)
                results.setdefault(topic, []).append(message)
        for topic, messages in results.items():
            try:
                self._inbox.results.send_many(topic, messages)
            except UnknownTopic:
                log.warning("there is no topic for results", once_for=topic, topic=topic)

    def _alone(self, message: ReceivedMessage) -> None:
        error: Exception | None = None
        try:
            self._inbox.consume(message, lambda session: self._function(session, message))
        except Exception as raised:
            error = raised
        verdict = judge(error, 1, 0)
        if verdict.is_error:
            tell_failure(message, error)
        verdict.settle(message)
