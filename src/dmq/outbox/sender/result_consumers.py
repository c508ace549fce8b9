"""The sender's result consumer: one thread for each topic that was sent to (T-04).

What always holds: a result is acked only after it is in the table; one whose reverse business fails comes again, later
and later, as long as it takes, and holds up no other; results of other apps never arrive here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import SQLAlchemyError

from dmq.errors import DMQError, InvalidMessage, UnknownTopic
from dmq.event_log import EventLog
from dmq.outbox.alerts import Alert, AlertKind, OnAlert
from dmq.outbox.metrics import Counts
from dmq.outbox.sender.envelope import Result, result_topic, unpack_result
from dmq.outbox.sender.result_book import ResultBook
from dmq.outbox.states import BusinessState

if TYPE_CHECKING:
    from dmq.client.client import Client
    from dmq.client.consumer.consumer import Consumer
    from dmq.client.consumer.message import Batch, ReceivedMessage

__all__ = ["ResultConsumers", "result_group"]

log = EventLog(__name__)

_BATCH: Final = 500
_WAIT_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 1.0
_LEASE_SECONDS: Final = 60.0


def result_group(app: str) -> str:
    """The group in which an app gets its results."""
    return f"outbox-{app}"


class ResultConsumers:
    """Listens for the results of some topics. Thread-safe."""

    def __init__(
        self, client: Client, app: str, book: ResultBook, alert_after: int, alert: OnAlert, counts: Counts
    ) -> None:
        self._client = client
        self._app = app
        self._book = book
        self._alert_after = alert_after
        self._alert = alert
        self._counts = counts
        self._mutex = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._ending = threading.Event()

    def listen(self, topics: Iterable[str]) -> None:
        """See that the results of these topics are listened for."""
        for topic in topics:
            if topic in self._threads:
                continue
            with self._mutex:
                if topic in self._threads or self._ending.is_set():
                    continue
                thread = threading.Thread(
                    target=self._run, args=(topic,), name=f"dmq-outbox-results-{topic}", daemon=True
                )
                self._threads[topic] = thread
            thread.start()

    def close(self, timeout: float = 10.0) -> None:
        self._ending.set()
        for thread in [*self._threads.values()]:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _run(self, topic: str) -> None:
        """Consume until closed, over every trouble."""
        is_told = False
        while not self._ending.is_set():
            consumer: Consumer | None = None
            try:
                consumer = self._client.consumer(
                    result_topic(topic), result_group(self._app), tags=self._app, max_attempts=None,
                    lease=_LEASE_SECONDS,
                )  # fmt: skip
                while not self._ending.is_set():
                    batch = consumer.pull(_BATCH, _WAIT_SECONDS)
                    is_told = False
                    if len(batch):
                        self.take(batch)
            except (DMQError, SQLAlchemyError) as error:
                self._counts.add("result_errors")
                if not is_told and not isinstance(error, UnknownTopic):
                    log.warning("results wait", once_for=topic, topic=topic, reason=error)
                is_told = True
            except Exception:
                log.exception("results could not be taken; they come again", once_for=topic, topic=topic)
            finally:
                self._leave(consumer)
            self._ending.wait(_AGAIN_SECONDS)

    @staticmethod
    def _leave(consumer: Consumer | None) -> None:
        """What was not acked goes back."""
        if consumer is not None:
            try:
                consumer.close()
            except DMQError:
                pass  # the broker notices by itself

    def take(self, batch: Batch[ReceivedMessage]) -> None:
        """Write results down and ack them.

        Raises:
            SQLAlchemyError: the database cannot be used; nothing that was not written is acked.
        """
        good: list[tuple[ReceivedMessage, Result]] = []
        refused: list[tuple[ReceivedMessage, Result]] = []
        for message in batch:
            try:
                result = unpack_result(message.body)
            except InvalidMessage as error:
                self._counts.add("results_unreadable")
                message.reject(str(error))
                continue
            (good if result.state is BusinessState.SUCCESS else refused).append((message, result))
        if good:
            self._book.succeeded([result for _, result in good])
            self._counts.add("results", len(good))
            for message, _ in good:
                message.ack()
        for message, result in refused:
            self._reverse(message, result)

    def _reverse(self, message: ReceivedMessage, result: Result) -> None:
        try:
            self._book.apply(result)
        except SQLAlchemyError:
            self._failed(message, result, "the database, or a statement of the reverse business, failed")
            raise
        except Exception as error:
            log.exception("the reverse business failed; it is tried again", once_for=(), send_id=result.send_id)
            self._failed(message, result, f"{type(error).__name__}: {error}")
            return
        self._counts.add("results")
        message.ack()

    def _failed(self, message: ReceivedMessage, result: Result, reason: str) -> None:
        self._counts.add("reverse_failed")
        attempt = message.attempt
        message.nack(reason=reason[:1000])
        if attempt == self._alert_after:
            self._alert(
                Alert(
                    kind=AlertKind.REVERSE,
                    send_id=result.send_id,
                    topic=result.topic,
                    group=result.group,
                    attempts=attempt,
                    reason=reason,
                )
            )
