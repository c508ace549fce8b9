"""The stock service: `python stock.py --broker URL --database URL`.

Takes books off the shelf, once for each order however often its message comes, and refuses what is not there.
"""

from __future__ import annotations

import json

from sqlalchemy import Engine, insert, select, update
from sqlalchemy.orm import Session
from startup import arguments_parser, connect, set_up
from tables import GROUP, TOPIC, movements, open_database, shelves

import dmq
from dmq.outbox import BusinessState, Inbox, Rollback


def take_books(session: Session, message: dmq.ReceivedMessage) -> BusinessState:
    """The business: in one transaction with the inbox's row."""
    order = json.loads(message.body)
    number, book, copies = order["order"], order["book"], order["copies"]
    here = shelves.c.book == book
    left = session.scalar(select(shelves.c.copies).where(here).with_for_update()) or 0
    if left < copies:
        print(f"order {number} is refused: not enough of {book}", flush=True)
        raise Rollback(f"not enough of {book}")
    session.execute(update(shelves).where(here).values(copies=left - copies))
    session.execute(insert(movements).values(order_number=number, book=book, copies=copies))
    print(f"order {number} leaves the house", flush=True)
    return BusinessState.SUCCESS


def consume(engine: Engine, client: dmq.Client) -> None:
    inbox = Inbox(engine, client)
    # The inbox may never give a message up, so the consumer does not either.
    consumer = client.consumer(TOPIC, GROUP, max_attempts=None, lease=5.0)
    consumer.run(inbox.consumes_messages(take_books), workers=4)


def main() -> None:
    arguments = arguments_parser(__doc__).parse_args()
    set_up()
    engine = open_database(arguments.database)
    with connect(arguments.broker, "stock") as client:
        consume(engine, client)


if __name__ == "__main__":
    main()
