"""A consumer in a process of its own that kills itself at a point: `consumer_process.py BROKER DATABASE POINT`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from sqlalchemy.orm import Session

import dmq
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox import BusinessState, Inbox
from tests.integration.outbox.effects import effect, open_database


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingInbox(Inbox):
    """Dies at the fifth message: before the commit, between commit and result, or between result and ack."""

    point = ""
    left = 5

    def answer(self, taken: Any, earlier: Any) -> None:
        self.left -= 1
        if self.point == "committed" and self.left <= 0:
            die()
        super().answer(taken, earlier)
        if self.point == "answered" and self.left <= 0:
            die()


def main(broker: str, database: str, point: str) -> None:
    with dmq.connect(broker, app="stock") as client:
        inbox = DyingInbox(open_database(database), client)
        inbox.point = point

        @inbox.consumes_messages
        def handle(session: Session, message: ReceivedMessage) -> BusinessState:
            session.execute(effect(message.body.decode()))
            if point == "working" and inbox.left <= 1:
                die()
            return BusinessState.ROLLBACK if message.body.startswith(b"no") else BusinessState.SUCCESS

        print("ready", flush=True)
        client.consumer("orders", "stock", prefetch=50).run(handle, workers=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
