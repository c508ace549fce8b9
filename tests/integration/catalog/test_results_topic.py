"""Results topics: `%RESULT%<topic>` is there with every topic, and goes with it (T-04)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dmq
from dmq.client.client import Client
from dmq.testing import TestBroker

NAME = "%RESULT%orders"


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(auto_create=False) as running:
        yield running


def system_names(client: Client) -> list[str]:
    return [topic.name for topic in client.admin.topics(system=True) if topic.name.startswith("%RESULT%")]


def test_a_results_topic_takes_and_gives_messages_once_its_topic_is_there(client: Client) -> None:
    with client.producer() as producer, client.consumer(NAME, "outbox-shop", tags="shop") as consumer:
        producer.send(NAME, b"to others", tag="others")
        producer.send(NAME, b"yes", tag="shop")
        message = next(consumer)
        assert (message.topic, message.body) == (NAME, b"yes")
        message.ack()
    assert [topic.name for topic in client.admin.topics()] == ["orders"]
    assert system_names(client) == [NAME]


def test_the_first_listener_creates_it(client: Client) -> None:
    with client.consumer(NAME, "outbox-shop") as consumer:
        assert len(consumer.pull(1, 0.0)) == 0
    assert system_names(client) == [NAME]


def test_it_outlives_a_restart_and_goes_with_its_topic(broker: TestBroker, client: Client) -> None:
    with client.producer() as producer:
        producer.send(NAME, b"kept")
        broker.kill()
        broker.start()
        with client.consumer(NAME, "outbox-shop") as consumer:
            message = next(consumer)
            assert message.body == b"kept"
            message.nack(delay=0.0)
            until_again = next(consumer)  # by way of a retry topic, which goes as well
            assert until_again.attempt == 2
        client.admin.delete_topic("orders")
        assert system_names(client) == []
        with pytest.raises(dmq.UnknownTopic, match="no topic 'orders'"):
            producer.send(NAME, b"late")
    assert [topic.name for topic in client.admin.topics(system=True) if "RETRY" in topic.name] == []


def test_a_topic_that_is_made_by_itself_is_made_for_its_results_too() -> None:
    with TestBroker() as broker:
        client = broker.connect()
        with client.producer() as producer:
            producer.send("%RESULT%fresh", b"x")
        assert [topic.name for topic in client.admin.topics()] == ["fresh"]


@pytest.mark.parametrize("name", ["%RESULT%", "%RESULT%%DLQ%x", "%RESULT%a b", "%DLQ%orders", "%RESULT%" + "x" * 250])
def test_other_names_of_ours_are_still_closed(client: Client, name: str) -> None:
    with client.producer() as producer, pytest.raises(dmq.InvalidName):
        producer.send(name, b"x")


def test_the_results_of_a_topic_that_is_not_there_have_no_place(client: Client) -> None:
    with client.producer() as producer, pytest.raises(dmq.UnknownTopic, match="no topic 'nothing'"):
        producer.send("%RESULT%nothing", b"x")
    with client.consumer("%RESULT%nothing", "g") as consumer, pytest.raises(dmq.UnknownTopic):
        consumer.pull(1, 0.0)


def test_results_topics_cannot_be_changed_or_deleted_by_themselves(client: Client) -> None:
    client.admin.topic(NAME)
    with pytest.raises(dmq.NotAllowed):
        client.admin.delete_topic(NAME)
    with pytest.raises(dmq.NotAllowed):
        client.admin.update_topic(NAME, queues=5)
