"""A program that is killed: stores orders with their messages, and says of each which it is once it is committed.

Arguments: the database, the broker's URL (or `-` for none), and where it stops to be killed: `commit`, between the
commit and the direct send; `mark`, between the send and the mark; `-`, nowhere.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from sqlalchemy.orm import Session

import dmq
from dmq.outbox import MessageService
from dmq.outbox.sender.relay import Claims
from tests.integration.outbox.effects import effect, open_database


def stop_here(*_: Any, **__: Any) -> Any:
    print("stopped", flush=True)
    threading.Event().wait()


def main(database: str, url: str, where: str) -> None:
    engine = open_database(database)
    client = None if url == "-" else dmq.connect(url, app="shop")
    if where == "commit":
        Claims.look = stop_here  # type: ignore[method-assign]
    elif where == "mark":
        Claims.sent = stop_here  # type: ignore[method-assign]
    service = MessageService(engine, client, app="shop", poll=0.05, grace=1.0, timeout=0.4, lease=1.0, relay=False)
    for number in range(10_000):
        with Session(engine) as session, session.begin():
            send_id = service.send(session, "orders", f"u{number % 3}/{number}", business_id=f"u{number % 3}")
            session.execute(effect(send_id))
        print(send_id, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
