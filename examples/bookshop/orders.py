"""The order service: `python orders.py serve|relay|compensate --broker URL --database URL`.

An order and the message about it are one transaction. If the stock service refuses, the order is cancelled.

    serve       places what customers have in their baskets, sends after each commit, and takes the results
    relay       sends what a killed `serve` had committed and not sent
    compensate  asks the stock service what became of messages whose results did not come

All times are short, so that nobody waits long for a process that was killed. The defaults are more patient.
"""

from __future__ import annotations

import json
import time
from typing import Any

from sqlalchemy import Engine, Row, insert, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from startup import arguments_parser, connect, set_up
from tables import GROUP, TOPIC, baskets, cancellations, open_database, orders

import dmq
from dmq.outbox import Compensator, MessageService, OutboxMessage, Relay, Result, sends_messages


class ChangedMind(Exception):
    """The customer leaves without ordering, at the last moment."""


class OrderService:
    """Places orders, and cancels those that are refused."""

    def __init__(self, engine: Engine, client: dmq.Client, *, results: bool = True) -> None:
        self.engine = engine
        self.messages = MessageService(
            engine, client, groups={TOPIC: [GROUP]}, reverse={TOPIC: self.cancel}, results=results,
            relay=False,  # we have one in a process of its own
            grace=3.0, lease=5.0, timeout=2.0, result_after=4.0,
        )  # fmt: skip

    @sends_messages
    def place(self, basket: Row[Any]) -> None:
        """An order and its message: both, or neither."""
        with Session(self.engine) as session, session.begin():
            body = json.dumps({"order": basket.number, "book": basket.book, "copies": basket.copies})
            send_id = self.messages.send(session, TOPIC, body, business_id=basket.book)
            session.execute(
                insert(orders).values(
                    number=basket.number, book=basket.book, copies=basket.copies, send_id=send_id, state="PLACED"
                )
            )
            self._empty(session, basket, "ORDERED")
            if basket.changes_mind:
                raise ChangedMind

    def cancel(self, session: Session, message: OutboxMessage, result: Result) -> None:
        """The reverse business: runs once for each refusal, in the transaction that writes the result down."""
        number = json.loads(message.body)["order"]
        session.execute(update(orders).where(orders.c.number == number).values(state="CANCELLED"))
        session.execute(insert(cancellations).values(order_number=number, reason=result.reason))
        print(f"order {number} is cancelled: {result.reason}", flush=True)

    def serve(self, pause: float) -> None:
        """Place the orders of all baskets, one after another; then wait for more."""
        waiting = select(baskets).where(baskets.c.state == "WAITING").order_by(baskets.c.number).limit(1)
        while True:
            with self.engine.connect() as connection:
                basket = connection.execute(waiting).first()
            if basket is not None:
                self._handle(basket)
            time.sleep(pause)

    def _handle(self, basket: Row[Any]) -> None:
        try:
            self.place(basket)
            print(f"order {basket.number} is placed: {basket.copies} of {basket.book}", flush=True)
        except ChangedMind:
            with Session(self.engine) as session, session.begin():
                self._empty(session, basket, "WITHDRAWN")
            print(f"order {basket.number} is withdrawn", flush=True)
        except OperationalError as error:
            # A lock that took too long, or a server that is away. The basket is still there.
            print(f"order {basket.number} has to wait: {error.orig}", flush=True)

    @staticmethod
    def _empty(session: Session, basket: Row[Any], state: str) -> None:
        session.execute(update(baskets).where(baskets.c.number == basket.number).values(state=state))


def relay(engine: Engine, client: dmq.Client) -> None:
    """What `dmq outbox relay` does, with less patience."""
    Relay(engine, client, poll=0.2, lease=5.0, timeout=2.0, result_after=4.0).run()


def compensate(engine: Engine, client: dmq.Client) -> None:
    """Neither places orders nor takes results, but knows how to cancel."""
    service = OrderService(engine, client, results=False)
    Compensator(service.messages, again=2.0, poll=1.0, tries=1000, timeout=2.0).run()


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("role", choices=["serve", "relay", "compensate"])
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two orders")
    arguments = parser.parse_args()
    set_up()
    engine = open_database(arguments.database)
    # The app is the same for all three: results come back by this name.
    with connect(arguments.broker, "bookshop") as client:
        if arguments.role == "relay":
            relay(engine, client)
        elif arguments.role == "compensate":
            compensate(engine, client)
        else:
            service = OrderService(engine, client)
            with service.messages:
                service.serve(arguments.pause)


if __name__ == "__main__":
    main()
