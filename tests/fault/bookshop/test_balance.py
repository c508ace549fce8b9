"""The bookshop's balance finds what is wrong: a checker that agrees with everything would prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine, insert, text, update

from dmq.outbox.sender.message_row import MessageDraft, make_row
from tests.fault.bookshop.rig import OUTBOX, example
from tests.integration.outbox.effects import disposed

TABLES, BALANCE = example("tables"), example("balance")


def story(here: Engine, there: Engine) -> None:
    """Order 1 was delivered, order 2 withdrawn, order 3 refused and cancelled."""
    BALANCE.fill(here, there, 3)
    with here.begin() as connection:
        for number, basket in ((1, "ORDERED"), (2, "WITHDRAWN"), (3, "ORDERED")):
            chosen = TABLES.baskets.c.number == number
            connection.execute(update(TABLES.baskets).where(chosen).values(state=basket))
        for number, state, sent, said in ((1, "PLACED", "DONE", "SUCCESS"), (3, "CANCELLED", "REVERSED", "ROLLBACK")):
            row = make_row("bookshop", MessageDraft("orders", b""), None, 1, 1)
            connection.execute(insert(OUTBOX.send), row | {"send_id": f"s-{number}", "state": sent})
            order = {"number": number, "book": "dune", "copies": 1, "send_id": f"s-{number}", "state": state}
            connection.execute(insert(TABLES.orders), order)
            answer = {"send_id": f"s-{number}", "consumer_group": "stock", "business_state": said, "consumer_id": "c"}
            connection.execute(insert(OUTBOX.result), answer | {"consumed_at_ms": 1, "received_at_ms": 1})
        connection.execute(insert(TABLES.cancellations), {"order_number": 3, "reason": "none left"})
    with there.begin() as connection:
        connection.execute(insert(TABLES.movements), {"order_number": 1, "book": "dune", "copies": 1})
        connection.execute(update(TABLES.shelves).values(bought=5, copies=5))
        connection.execute(update(TABLES.shelves).where(TABLES.shelves.c.book == "dune").values(copies=4))


def test_a_good_story_is_good(tmp_path: Path) -> None:
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        ("there: INSERT INTO movements (order_number, book, copies) VALUES (1, 'emma', 0)", "taken 2 times"),
        ("there: DELETE FROM movements", "taken 0 times"),
        ("there: INSERT INTO movements (order_number, book, copies) VALUES (2, 'emma', 0)", "never placed: [2]"),
        ("there: UPDATE shelves SET copies = copies - 1", "dune: 5 bought, 1 taken, 3 left"),
        ("here: INSERT INTO cancellations (order_number, reason) VALUES (3, '')", "cancelled 2 times"),
        ("here: DELETE FROM cancellations", "cancelled 0 times"),
        ("here: INSERT INTO cancellations (order_number, reason) VALUES (1, '')", "order 1: PLACED"),
        ("here: UPDATE orders SET state = 'PLACED'", "order 3: PLACED, message REVERSED"),
        ("here: DELETE FROM m_msgresult WHERE send_id = 's-1'", "results []"),
        ("here: UPDATE m_msgsend SET state = 'SENT' WHERE send_id = 's-1'", "message SENT"),
        ("here: DELETE FROM m_msgsend WHERE send_id = 's-3'", "not the same"),
        ("here: DELETE FROM orders WHERE number = 1", "a basket is lost"),
    ],
)
def test_whatever_does_not_agree_is_found(spoil: str, what: str, tmp_path: Path) -> None:
    assert what in " | ".join(problems(tmp_path, spoil))


def problems(folder: Path, spoil: str = "") -> list[str]:
    with (
        disposed(TABLES.open_database(f"sqlite:///{folder / 'orders.db'}")) as here,
        disposed(TABLES.open_database(f"sqlite:///{folder / 'stock.db'}")) as there,
    ):
        story(here, there)
        if spoil:
            where, _, statement = spoil.partition(": ")
            with (here if where == "here" else there).begin() as connection:
                connection.execute(text(statement))
        found: list[str] = BALANCE.balance(here, there).problems
        return found
