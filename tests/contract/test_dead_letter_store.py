"""What every database of dead letters must do, on SQLite, MariaDB and PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import inspect, text

from dmq.deadletters.letter import DeadLetter, LetterFilter, LetterState, letter_of, record_of
from dmq.deadletters.store import DeadLetterStore
from dmq.deadletters.url import default_url
from dmq.errors import DatabaseDown, WrongFormat
from dmq.model import Message, MessageId
from dmq.records import Compressor, DeadReason, EncodeOptions, RecordView, Stamp, encode_batch, moved_record, stamp_few
from dmq.records.attributes import Attributes
from tests.databases import DatabaseServers

AT_MS = 1_700_000_000_000
ANY = LetterFilter(state="")


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path, database_servers: DatabaseServers) -> str:
    return default_url(tmp_path) if request.param == "sqlite" else database_servers.get(request.param).url


@pytest.fixture
def store(url: str) -> Iterator[DeadLetterStore]:
    store = DeadLetterStore(url)
    store.open()
    yield store
    store.close()


def record(message: Message, number: int, **said: Any) -> RecordView:
    """The record of a dead letter, as the journal has it."""
    encoded = encode_batch(
        "orders", "shop", [message], sent_at_ms=AT_MS, options=EncodeOptions(compressor=Compressor("auto"))
    )
    data = bytearray(encoded.data)
    stamp_few(data, [0], [4096], Stamp(3, 77, bytes(6), bytes(6), AT_MS + 1, AT_MS + 2))
    options: dict[str, Any] = {
        "attempt": 2,
        "group": "billing",
        "reason": "boom",
        "reason_code": DeadReason.REJECTED,
    } | said
    moved = moved_record(
        RecordView(data),
        f"%DLQ%{options['group'] or ''}",
        sent_at_ms=AT_MS + 10 + number,
        message_id=MessageId(7, number),
        says=Attributes(first_error="bang", **options),
    )
    return RecordView(moved)


def letter(number: int, message: Message | None = None, **said: Any) -> DeadLetter:
    return letter_of(record(message or Message(b"body %d" % number, key=f"k-{number}"), number, **said), "broker-a")


def numbers(store: DeadLetterStore, wanted: LetterFilter = ANY) -> list[int]:
    """Sequences of the messages that a filter finds, in the order of the list."""
    return [found.message_id.sequence for found in store.page(wanted).letters]


def test_a_letter_comes_back_as_it_was_put(store: DeadLetterStore) -> None:
    message = Message(
        b"\x00\xff body",
        key="schlüssel",
        tag="bezahlt 🎉",
        business_id="u-7",
        ordered=True,
        properties={"a": "ü", "🎉": ""},
    )
    put = letter(1, message)
    assert store.put([put]) == []
    (found,) = store.page(ANY).letters
    assert found.number > 0
    same = msgspec.structs.replace(found, number=0, attributes=put.attributes)
    assert same == put
    assert (found.reason, found.first_error, found.last_error) == ("REJECTED", "bang", "boom")
    assert (found.topic, found.queue, found.offset, found.app) == ("orders", 3, 77, "shop")
    assert (found.sent_at_ms, found.dead_at_ms, found.state) == (AT_MS, AT_MS + 11, "waiting")


def test_a_letter_becomes_the_record_again_that_it_was(store: DeadLetterStore) -> None:
    message = Message(b"again and " * 900, key="k\0ey" * 100, tag="t", business_id="b", properties={"nul": "\0"})
    before = record(message, 1)
    assert before.compressed
    store.put([letter_of(before, "a")])
    (claimed,) = store.claim([store.page(ANY).letters[0].number], "a", "me").letters
    after = record_of(claimed)
    after.verify()
    assert after.body == message.body
    assert after.compressed
    assert (after.key, after.tag, after.properties) == (message.key, message.tag, message.properties)
    assert (after.app, after.business_id, after.priority, after.flags) == ("shop", "b", 4, before.flags)
    assert (after.message_id, after.attributes.original_topic) == (MessageId(7, 1), "orders")


def test_putting_twice_keeps_the_first_with_its_state(store: DeadLetterStore) -> None:
    store.put([letter(1), letter(2)])
    first = store.page(ANY).letters[0]
    store.delete([first.number], "me", AT_MS)
    assert store.put([letter(1), letter(2), letter(3)]) == []
    states = {found.message_id.sequence: found.state for found in store.page(ANY).letters}
    assert states == {1: "deleted", 2: "waiting", 3: "waiting"}


def test_a_message_is_one_letter_for_each_group_and_attempt(store: DeadLetterStore) -> None:
    store.put([letter(1), letter(1, group="Billing"), letter(1, group="audit"), letter(1, attempt=3), letter(1)])
    found = {(each.group, each.attempts) for each in store.page(ANY).letters}
    assert found == {("billing", 2), ("Billing", 2), ("audit", 2), ("billing", 3)}


def test_letters_are_found_by_what_they_are(store: DeadLetterStore) -> None:
    store.put(
        [
            letter(1),
            letter(2, group="audit", reason_code=DeadReason.EXPIRED),
            letter(3, reason_code=DeadReason.RETRIES_EXHAUSTED),
            letter(4, group=None, reason_code=DeadReason.RATE_LIMITED),
        ]
    )
    assert numbers(store) == [1, 2, 3, 4]
    assert numbers(store, LetterFilter(group="billing")) == [1, 3]
    assert numbers(store, LetterFilter(group="BILLING")) == []
    assert numbers(store, LetterFilter(topic="orders", reason="EXPIRED")) == [2]
    assert numbers(store, LetterFilter(topic="other")) == []
    assert numbers(store, LetterFilter(since_ms=AT_MS + 12, until_ms=AT_MS + 14)) == [2, 3]
    assert numbers(store, LetterFilter(message_ids=(MessageId(7, 3), MessageId(7, 9)))) == [3]
    assert numbers(store, LetterFilter(state="deleted")) == []
    assert store.count(LetterFilter(group="billing")) == 2
    limited = store.page(LetterFilter(reason="RATE_LIMITED")).letters[0]
    assert (limited.group, limited.queue, limited.offset) == ("", None, None)


def test_pages_follow_each_other_and_are_bounded(store: DeadLetterStore) -> None:
    bodies = [Message(bytes([n]) * 100_000) for n in range(6)]
    store.put([letter(n, body) for n, body in enumerate(bodies)])
    seen: list[int] = []
    after, pages = 0, 0
    while True:
        page = store.page(ANY, after, 4, bodies_bytes_max=250_000)
        pages += 1
        assert len(page.letters) == 2
        for found in page.letters:
            assert found.body == bodies[found.message_id.sequence].body
            seen.append(found.message_id.sequence)
        if not page.more:
            break
        after = page.letters[-1].number
    assert (seen, pages) == ([0, 1, 2, 3, 4, 5], 3)
    assert len(store.page(ANY, 0, 4, bodies_bytes_max=1).letters) == 1, "one, however large"
    bare = store.page(ANY, 0, 4, with_bodies=False, bodies_bytes_max=1)
    assert [(found.body, found.body_bytes) for found in bare.letters] == [(b"", 100_000)] * 4
    assert bare.more
    assert len(store.page(ANY, 0, 100, texts_bytes_max=1500).letters) == 1


def test_a_large_body_that_was_sent_compressed_stays_so(store: DeadLetterStore) -> None:
    body = b"0123456789abcdef" * (600 << 10)
    store.put([letter(1, Message(body))])
    (found,) = store.claim([store.page(ANY).letters[0].number], "a", "me").letters
    assert found.codec
    assert (found.body_bytes, len(found.body) < 1 << 20) == (len(body), True)
    assert record_of(found).body == body


def test_long_and_odd_texts_are_cut_for_the_table_and_whole_in_the_message(store: DeadLetterStore) -> None:
    message = Message(b"x", key="ü" * 3000, tag="\0", properties={"p": "v" * 40_000})
    put = letter(1, message, reason="é" * 2000)
    assert store.put([put]) == []
    (found,) = store.page(ANY).letters
    assert (len(found.key or ""), (found.key or "")[-1], found.tag) == (255, "…", "␀")
    assert found.last_error.endswith("…")
    (claimed,) = store.claim([found.number], "a", "me").letters
    again = record_of(claimed)
    assert (again.key, again.tag, again.properties) == (message.key, message.tag, message.properties)


def test_what_the_database_refuses_harms_no_other(store: DeadLetterStore) -> None:
    bad = msgspec.structs.replace(letter(2), offset=1 << 70)
    refused = store.put([letter(1), bad, letter(3), msgspec.structs.replace(letter(4), priority=1 << 70), letter(5)])
    assert [problem.place for problem in refused] == [1, 3]
    assert all(problem.error for problem in refused)
    assert numbers(store) == [1, 3, 5]


def test_a_letter_is_claimed_sent_and_marked(store: DeadLetterStore) -> None:
    store.put([letter(1), letter(2)])
    one, two = [found.number for found in store.page(ANY).letters]
    claimed = store.claim([two, 999_999, one], "a", "shop/me")
    assert [found.message_id.sequence for found in claimed.letters] == [2, 1]
    assert "no dead letter 999999" in claimed.problems[999_999]
    assert [found.number for found in store.claims("a")] == [one, two]
    other = store.claim([one], "b", "you")
    assert other.letters == []
    assert "being resent by broker a" in other.problems[one]
    assert "being resent" in store.delete([one], "you", AT_MS)[one]
    store.mark_resent([two], "a", AT_MS + 5)
    store.release([one], "a")
    assert store.claims("a") == []
    found = {each.number: each for each in store.page(ANY).letters}
    assert (found[two].state, found[two].changed_by, found[two].changed_at_ms) == ("resent", "shop/me", AT_MS + 5)
    assert (found[one].state, found[one].changed_by, found[one].claimed_by) == ("waiting", None, None)
    assert "it was resent by shop/me" in store.claim([two], "a", "me").problems[two]


def test_a_claim_of_ours_is_ours_again_and_says_so(store: DeadLetterStore) -> None:
    store.put([letter(1)])
    (number,) = [found.number for found in store.page(ANY).letters]
    assert store.claim([number], "a", "me").letters[0].claimed_by is None
    assert store.claim([number], "a", "me").letters[0].claimed_by == "a"


def test_claims_take_no_more_than_fits(store: DeadLetterStore) -> None:
    store.put([letter(n, Message(bytes([n]) * 1000)) for n in range(5)])
    wanted = [found.number for found in store.page(ANY).letters]
    claimed = store.claim(wanted, "a", "me", bytes_max=2500)
    assert [found.number for found in claimed.letters] == wanted[:2]
    assert claimed.left == wanted[2:]
    assert [found.number for found in store.claims("a")] == wanted[:2]


def test_deleting_forgets_the_content_and_keeps_the_row(store: DeadLetterStore) -> None:
    store.put([letter(1, Message(b"secret", properties={"a": "secret"})), letter(2)])
    number = store.page(ANY).letters[0].number
    assert store.delete([number], "shop/me", AT_MS + 9) == {}
    (found,) = store.page(LetterFilter(state=LetterState.DELETED)).letters
    assert (found.body, found.properties, found.changed_by, found.changed_at_ms) == (b"", {}, "shop/me", AT_MS + 9)
    assert "it was deleted by shop/me" in store.delete([number], "you", AT_MS)[number]
    assert numbers(store, LetterFilter()) == [2]


def test_two_that_claim_at_once_do_not_both_get_a_letter(url: str) -> None:
    stores = [DeadLetterStore(url) for _ in range(2)]
    for opened in stores:
        opened.open()
    stores[0].put([letter(n) for n in range(40)])
    wanted = [found.number for found in stores[0].page(ANY).letters]
    got: list[list[int]] = [[], []]

    def claim(index: int) -> None:
        for number in wanted:
            got[index] += [found.number for found in stores[index].claim([number], f"b{index}", "me").letters]

    threads = [threading.Thread(target=claim, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got[0] + got[1]) == wanted
    for opened in stores:
        opened.close()


def test_the_tables_are_made_once_by_however_many(url: str) -> None:
    problems: list[BaseException] = []

    def make() -> None:
        opened = DeadLetterStore(url)
        try:
            opened.open()
            opened.put([letter(1)])
        except BaseException as error:
            problems.append(error)
        finally:
            opened.close()

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    last = DeadLetterStore(url)
    assert numbers(last) == [1]
    last.close()


def test_a_table_of_another_version_is_left_alone(store: DeadLetterStore, url: str) -> None:
    with store._engine.begin() as connection:
        connection.execute(text("UPDATE dmq_schema SET version = 99"))
    later = DeadLetterStore(url)
    with pytest.raises(WrongFormat, match="has version 99, this DMQ knows 1"):
        later.open()
    later.close()


@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
def test_a_database_that_is_gone_is_said_to_be_without_its_password(
    database_servers: DatabaseServers, kind: str
) -> None:
    server = database_servers.get(kind)
    store = DeadLetterStore(server.url)
    store.open()
    store.put([letter(1)])
    server.kill()
    for ask in (lambda: store.put([letter(2)]), lambda: store.page(ANY), store.open):
        with pytest.raises(DatabaseDown, match=r"check broker\.dead_letters_url") as caught:
            ask()
        assert "s3cret" not in caught.value.message
    server.start()
    assert store.put([letter(2)]) == []
    assert numbers(store) == [1, 2]
    store.close()


def test_the_table_has_the_columns_that_people_ask_for(store: DeadLetterStore) -> None:
    columns = {column["name"] for column in inspect(store._engine).get_columns("dmq_dead_letter")}
    assert columns >= {
        *("message_id", "topic", "queue", "offset", "group", "key", "tag", "business_id", "reason", "attempts"),
        *("first_error", "last_error", "body", "properties", "sent_at_ms", "dead_at_ms", "state", "changed_by"),
    }
