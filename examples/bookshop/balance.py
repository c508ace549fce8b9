"""The balance of both databases: what must be true when everything has come to its end."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from sqlalchemy import Connection, Engine, func, insert, select, update
from tables import baskets, cancellations, create, movements, order_data, orders, shelves, stock_data

from dmq.outbox import tables

BOOKS = ("dune", "emma", "ulysses", "walden")
OPEN = ("NEW", "SENT", "ALERTED")
outbox = tables()


class Balance(NamedTuple):
    """What happened, and what is wrong with it; nothing, if all agrees."""

    placed: int
    withdrawn: int
    delivered: int
    cancelled: int
    problems: list[str]


def fill(order_engine: Engine, stock_engine: Engine, count: int) -> None:
    """Customers fill baskets. There are books for three quarters of the orders, and two in ten customers leave."""
    create(order_engine, order_data)
    create(stock_engine, stock_data)
    with order_engine.begin() as connection:
        first = (connection.scalar(select(func.max(baskets.c.number))) or 0) + 1
        rows = [
            {
                "number": number, "book": BOOKS[number % 4], "copies": 1 + number % 3,
                "changes_mind": number % 5 == 2, "state": "WAITING",
            }
            for number in range(first, first + count)
        ]  # fmt: skip
        connection.execute(insert(baskets), rows)
    with stock_engine.begin() as connection:
        if connection.scalar(select(func.count()).select_from(shelves)) == 0:
            connection.execute(insert(shelves), [{"book": book, "bought": 0, "copies": 0} for book in BOOKS])
        copies = count * 2 * 8 // 10 * 3 // 4 // len(BOOKS)
        connection.execute(update(shelves).values(bought=shelves.c.bought + copies, copies=shelves.c.copies + copies))


def is_over(engine: Engine) -> bool:
    """Whether every basket was seen to, and every message has its result."""
    with engine.connect() as connection:
        waiting = connection.scalar(select(func.count()).where(baskets.c.state == "WAITING"))
        unanswered = connection.scalar(select(func.count()).where(outbox.send.c.state.in_(OPEN)))
    return not waiting and not unanswered


def balance(order_engine: Engine, stock_engine: Engine) -> Balance:
    """Compare both databases."""
    problems: list[str] = []

    def must(is_so: bool, what: str) -> None:
        if not is_so:
            problems.append(what)

    with order_engine.connect() as here, stock_engine.connect() as there:
        wishes = {row.number: row.state for row in here.execute(select(baskets))}
        placed = {row.number: row for row in here.execute(select(orders))}
        states = {row.send_id: row.state for row in here.execute(select(outbox.send))}
        answers = _answers(here)
        reversed_ = Counter(here.scalars(select(cancellations.c.order_number)))
        moved = Counter(there.scalars(select(movements.c.order_number)))
        taken = {row[0]: int(row[1]) for row in there.execute(_taken)}
        on_shelves = [*there.execute(select(shelves))]
    must({number for number, state in wishes.items() if state == "ORDERED"} == {*placed}, "a basket is lost")
    must({row.send_id for row in placed.values()} == {*states}, "orders and messages are not the same")
    must({*moved} <= {*placed}, f"books went out for orders that were never placed: {sorted({*moved} - {*placed})}")
    for number, row in placed.items():
        state, answer = states.get(row.send_id), answers.get(row.send_id, [])
        if row.state == "PLACED":
            good = state == "DONE" and answer == ["SUCCESS"] and moved[number] == 1 and reversed_[number] == 0
        else:
            good = state == "REVERSED" and answer == ["ROLLBACK"] and moved[number] == 0 and reversed_[number] == 1
        must(
            good,
            f"order {number}: {row.state}, message {state}, results {answer}, taken {moved[number]} times, cancelled "
            f"{reversed_[number]} times",
        )
    for shelf in on_shelves:
        must(
            shelf.bought - taken.get(shelf.book, 0) == shelf.copies >= 0,
            f"{shelf.book}: {shelf.bought} bought, {taken.get(shelf.book, 0)} taken, {shelf.copies} left",
        )
    cancelled = sum(row.state == "CANCELLED" for row in placed.values())
    withdrawn = sum(state == "WITHDRAWN" for state in wishes.values())
    return Balance(len(placed), withdrawn, len(placed) - cancelled, cancelled, problems)


_taken = select(movements.c.book, func.sum(movements.c.copies)).group_by(movements.c.book)


def _answers(connection: Connection) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in connection.execute(select(outbox.result)):
        found.setdefault(row.send_id, []).append(row.business_state)
    return found
