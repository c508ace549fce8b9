"""Limits on what producers send, by a clock that is moved. (D-16, J-11)"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmq.broker.publish.rate_limits import Limit, Limits, kept_limits
from dmq.storage.state.events import LimitPut
from dmq.storage.store import MessageStore
from dmq.testing import MemoryFiles


def limits(*each: Limit, now: float = 0.0) -> Limits:
    made = Limits()
    made.replace(each, now)
    return made


def test_without_limits_there_are_no_rules_and_everything_passes() -> None:
    none = limits()
    assert not none.rules
    assert none.take("orders", "shop", 10**9, 10**12, 0.0) is None


def test_a_second_s_worth_passes_at_once_and_then_it_says_when_to_try_again() -> None:
    some = limits(Limit("orders", messages=10))
    assert some.take("orders", "shop", 10, 1000, 0.0) is None
    over = some.take("orders", "shop", 5, 500, 0.0)
    assert over is not None
    assert (over.retry_after_ms, over.is_dead_letter) == (500, False)
    assert some.take("orders", "shop", 5, 500, 0.5) is None
    assert some.take("orders", "shop", 1, 1, 0.5) is not None


def test_messages_and_bytes_are_limited_each_for_itself() -> None:
    some = limits(Limit("orders", messages=100, bytes=1000))
    assert some.take("orders", "", 1, 1000, 0.0) is None
    over = some.take("orders", "", 1, 250, 0.0)
    assert over is not None
    assert over.retry_after_ms == 250
    assert some.take("orders", "", 1, 0, 0.0) is None


def test_a_batch_larger_than_the_bucket_passes_whole_and_is_paid_for_afterwards() -> None:
    some = limits(Limit("orders", messages=10))
    assert some.take("orders", "", 50, 0, 0.0) is None
    over = some.take("orders", "", 1, 0, 1.0)
    assert over is not None
    assert over.retry_after_ms == 3100
    assert some.take("orders", "", 1, 0, 1.0 + 3.1) is None


def test_a_limit_of_an_app_holds_for_all_topics_and_for_no_other_app() -> None:
    some = limits(Limit(app="shop", messages=2))
    assert some.take("a", "shop", 1, 0, 0.0) is None
    assert some.take("b", "shop", 1, 0, 0.0) is None
    over = some.take("c", "shop", 1, 0, 0.0)
    assert over is not None
    assert "app 'shop'" in over.limit.describe()
    assert some.take("c", "bank", 1000, 0, 0.0) is None


def test_what_one_limit_refuses_takes_nothing_from_the_other() -> None:
    some = limits(Limit("orders", messages=10), Limit(app="shop", messages=2))
    assert some.take("orders", "shop", 2, 0, 0.0) is None
    assert some.take("orders", "shop", 2, 0, 0.0) is not None
    assert some.take("orders", "bank", 8, 0, 0.0) is None


def test_what_any_limit_refuses_does_not_become_a_dead_letter() -> None:
    dead, refuse = Limit("orders", messages=1, is_dead_letter=True), Limit(app="shop", messages=1)
    both = limits(dead, refuse)
    assert both.take("orders", "shop", 1, 0, 0.0) is None
    over = both.take("orders", "shop", 1, 0, 0.0)
    assert over is not None
    assert not over.is_dead_letter
    over = both.take("orders", "bank", 1, 0, 0.0)
    assert over is not None
    assert over.is_dead_letter


def test_a_limit_that_is_changed_holds_at_once_and_gives_nothing_away() -> None:
    some = limits(Limit("orders", messages=10))
    assert some.take("orders", "", 10, 0, 0.0) is None
    some.replace([Limit("orders", messages=100)], 0.0)
    over = some.take("orders", "", 10, 0, 0.0)
    assert over is not None
    assert over.retry_after_ms == 100
    some.replace([], 0.0)
    assert some.take("orders", "", 10**6, 0, 0.0) is None


def test_limits_outlive_the_store_a_checkpoint_and_not_their_topic() -> None:
    files = MemoryFiles()
    store = MessageStore(files)
    topic = store.create_topic("orders")
    store.append([LimitPut(topic.id, "", 5, None, 1), LimitPut(0, "shop", None, 7)])
    store.append([LimitPut(0, "bank", 1), LimitPut(0, "bank")])
    store.flush()
    expected = [Limit("", "shop", None, 7, False), Limit("orders", "", 5, None, True)]
    assert kept_limits(store.queries) == expected
    store.close()
    store = MessageStore(files)
    assert kept_limits(store.queries) == expected
    store.checkpoint()
    store.delete_topic("orders")
    assert kept_limits(store.queries) == expected[:1]
    store.create_topic("orders")
    assert kept_limits(store.queries) == expected[:1]
    store.close()


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 2)), max_size=60))
def test_never_more_passes_than_the_rate_a_second_s_worth_and_a_batch(steps: list[tuple[int, float]]) -> None:
    some = limits(Limit("t", messages=10))
    now, passed, largest = 0.0, 0, 0
    for count, pause in steps:
        now += pause
        over = some.take("t", "", count, 0, now)
        if over is None:
            passed += count
            largest = max(largest, count)
        else:
            assert over.seconds > 0.0
        assert passed <= 10 * now + 10 + largest + 1e-6
