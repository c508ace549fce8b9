"""What a broker shows of itself: metrics for machines, health for orchestrators, a page for people."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

import dmq
from dmq.broker.diagnostics.exposition import _Text
from dmq.broker.diagnostics.metrics import FIGURES, SERIES
from dmq.broker.server import BrokerServer
from dmq.errors import NotAllowed
from dmq.settings import BrokerSettings, Settings
from dmq.testing import MemoryFiles
from dmq.testing.clock import RunningClock
from tests.exposition_format import checked_samples
from tests.integration.broker_thread import ServedBroker
from tests.patience import eventually


@pytest.fixture
def broker() -> Iterator[ServedBroker]:
    with ServedBroker(MemoryFiles(), status_port=0, auto_create=True, name="shop & <co>") as running:
        yield running


def get(port: int, path: str) -> tuple[int, str, str]:
    """Status, kind and text of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def metrics(broker: ServedBroker, path: str = "/metrics") -> dict[str, float]:
    """The samples of the metrics page, each checked for its form."""
    status, kind, text = get(broker.server.metrics_port, path)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8"), text
    return checked_samples(text)


def test_metrics_are_prometheus_text_and_count_what_happens(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.producer().send_many("orders", [dmq.Message(b"x")] * 10)
        consumer = client.consumer("orders", "billing")
        batch = consumer.pull(4)
        batch.ack()
        eventually(lambda: metrics(broker)["dmq_lag_messages"] == 10 - len(batch))
        shown = metrics(broker)
    of = '{topic="orders",group="billing"}'
    assert shown["dmq_produced_messages_total"] == shown['dmq_topic_produced_messages_total{topic="orders"}'] == 10
    assert shown["dmq_produced_bytes_total"] == shown['dmq_topic_produced_bytes_total{topic="orders"}'] > 10
    assert shown["dmq_delivered_messages_total"] == shown[f"dmq_group_delivered_messages_total{of}"] == len(batch)
    assert shown["dmq_delivered_bytes_total"] == shown[f"dmq_group_delivered_bytes_total{of}"] > len(batch)
    assert shown[f"dmq_group_acked_messages_total{of}"] == len(batch)
    assert shown["dmq_clients"] == 1
    assert shown[f"dmq_group_lag_messages{of}"] == shown["dmq_lag_messages"] == 10 - len(batch)
    assert 0 <= shown[f"dmq_group_oldest_age_seconds{of}"] < 100
    assert shown["dmq_store_failed"] == 0
    assert shown["dmq_produce_seconds_count"] >= 1
    assert shown["dmq_delivery_seconds_count"] == len(batch)
    (build,) = [series for series in shown if series.startswith("dmq_build_info")]
    assert f'version="{dmq.__version__}"' in build
    assert 0 < shown["dmq_disk_used_ratio"] < 1


def test_redeliveries_retries_and_dead_letters_are_counted_for_their_group(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.producer().send_many("orders", [dmq.Message(b"x")] * 2)
        consumer = client.consumer("orders", "billing", ordered=True)
        for _ in range(2):
            next(consumer).nack(delay=0)
        next(consumer).reject("bad")
        eventually(lambda: metrics(broker)["dmq_dead_letter_messages_total"] == 1)
    shown = metrics(broker)
    of = '{topic="orders",group="billing"}'
    assert shown["dmq_redelivered_messages_total"] == shown[f"dmq_group_redelivered_messages_total{of}"] == 2
    assert shown[f"dmq_group_dead_letter_messages_total{of}"] == 1


def test_the_page_is_bounded_and_the_detail_has_everything_in_slices() -> None:
    with ServedBroker(metrics_series_max=3, status_port=0) as broker, dmq.connect(broker.url) as client:
        for number in range(5):
            topic = f"topic-{number}"
            client.admin.create_topic(topic, queues=2)
            client.producer().send_many(topic, [dmq.Message(b"x")] * (number + 1))
            for group in ("billing", "audit"):
                client.admin.create_group(group, topic)
        shown = metrics(broker)
        lags = {series: value for series, value in shown.items() if series.startswith("dmq_group_lag_messages")}
        assert sorted(lags.values()) == [4, 5, 5], "the largest are shown"
        assert len([series for series in shown if series.startswith("dmq_topic_kept_messages")]) == 3
        assert shown['dmq_series_hidden{of="groups"}'] == 7
        assert shown['dmq_series_hidden{of="topics"}'] == 2
        assert shown["dmq_lag_messages"] == 30
        found: dict[str, float] = {}
        path: str | None = "/metrics/detail?limit=4"
        while path is not None:
            text = get(broker.server.metrics_port, path)[2]
            samples = checked_samples(text)
            assert not samples.keys() & found.keys(), "no pair stands in two slices"
            found |= samples
            path = next(iter(re.findall(r"^# next: (\S+)$", text, re.MULTILINE)), None)
        lags = {series: value for series, value in found.items() if series.startswith("dmq_group_lag_messages")}
        assert sorted(lags.values()) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        topics = metrics(broker, "/metrics/detail?of=topics")
        assert [topics[f'dmq_topic_kept_messages{{topic="topic-{n}"}}'] for n in range(5)] == [1, 2, 3, 4, 5]
        assert get(broker.server.metrics_port, "/metrics/detail?of=queues")[0] == 400
        assert get(broker.server.metrics_port, "/metrics/detail?after=-1")[0] == 400
        status = get(broker.server.status_port, "/")[2]
        rows = Tables(status).rows
        assert [row[0] for row in rows["Topics"][1:]] == ["topic-4", "topic-3", "topic-2"]
        assert sorted(row[5] for row in rows["Groups"][1:]) == ["4", "5", "5"]
        assert "2 more topics" in status
        assert "7 more groups" in status


def test_what_is_leased_is_counted_until_it_is_settled_or_gone() -> None:
    with ServedBroker() as broker, dmq.connect(broker.url) as client:
        for topic in ("orders", "gone", "again"):
            client.admin.create_topic(topic, queues=1)
            client.producer().send_many(topic, [dmq.Message(b"x")] * 4)
            assert len(client.consumer(topic, "billing").pull(4)) == 4
        assert metrics(broker)["dmq_leased_messages"] == 12
        client.admin.delete_topic("gone")
        eventually(lambda: metrics(broker)["dmq_leased_messages"] == 8)
        client.admin.reset("again", "billing", "latest")
        eventually(lambda: metrics(broker)["dmq_leased_messages"] == 4)


def test_a_long_page_comes_in_parts() -> None:
    text, metric = _Text(), SERIES["dmq_topic_kept_messages"]
    for number in range(1000):
        text.add(metric, number, f'{{topic="t{number}"}}')
    parts = asyncio.run(text.parts())
    assert max(part.count("\n") for part in parts) <= 250
    assert len(checked_samples("".join(parts))) == 1000


def test_every_figure_is_in_the_list(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        # Reasons are labels of one metric.
        assert {name for name in client.admin.stats() if "straight_left_" not in name} <= FIGURES.keys()
    names = [metric.name for metric in (*FIGURES.values(), *SERIES.values())]
    assert len(set(names)) == len(names)


def test_counters_do_not_fall_when_a_group_or_a_topic_goes(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.producer().send("orders", b"x")
        client.consumer("orders", "billing", auto_ack=True).pull(1)
        before = metrics(broker)["dmq_delivered_messages_total"]
        assert before == 1
        client.admin.delete_topic("orders")
        assert metrics(broker)["dmq_delivered_messages_total"] == before


def test_the_lag_of_a_group_is_shown_before_its_consumers_are_back(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.producer().send("orders", b"x")
        client.admin.create_group("billing", "orders")
    broker.restart()
    assert metrics(broker)['dmq_group_lag_messages{topic="orders",group="billing"}'] == 1


def test_health_and_readiness(broker: ServedBroker) -> None:
    port = broker.server.metrics_port
    assert get(port, "/healthz")[:1] == (200,)
    assert get(port, "/readyz") == (200, "text/plain; charset=utf-8", "ready\n")
    assert get(port, "/nothing")[0] == 404


def test_a_broker_that_stops_is_alive_but_not_ready(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.producer().send("orders", b"x")
        batch = client.consumer("orders", "billing").pull(1)  # in hand, so the broker waits for it
        stopping = threading.Thread(target=broker.stop, args=(30.0,))
        stopping.start()
        port = broker.server.metrics_port
        eventually(lambda: get(port, "/readyz")[0] == 503)
        assert get(port, "/healthz")[0] == 200
        assert metrics(broker)["dmq_leased_messages"] == 1
        batch.ack()
        stopping.join(30)
        assert not stopping.is_alive()


def test_pages_answer_only_get_and_short_requests(broker: ServedBroker) -> None:
    port = broker.server.metrics_port
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", data=b"x", timeout=120)
    with caught.value as answer:
        assert answer.code == 405
    with urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{port}/healthz", method="HEAD"), timeout=30
    ) as answer:
        assert (answer.status, answer.read()) == (200, b"")
    with pytest.raises((OSError, urllib.error.URLError)):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/{'x' * 20_000}", timeout=120).close()


class Tables(HTMLParser):
    """The tables of a page, by the heading before them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: dict[str, list[list[str]]] = {}
        self.title = self._heading = ""
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: object) -> None:
        if tag == "tr":
            self.rows.setdefault(self._heading, []).append([])
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if inside == "h1":
            self.title += data
        elif inside == "h2":
            self._heading = data
        elif inside in ("td", "th"):
            self.rows[self._heading][-1].append(data)


def test_the_status_page_shows_topics_groups_and_lag(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=2)
        client.producer().send_many("orders", [dmq.Message(b"x")] * 5)
        batch = client.consumer("orders", "billing").pull(2)
        batch.ack()
        eventually(lambda: client.admin.lag("orders", "billing").total == 5 - len(batch))
        status, kind, text = get(broker.server.status_port, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    page = Tables(text)
    assert page.title == "DMQ broker shop & <co>"
    assert page.rows["Topics"][1:] == [["orders", "2", "5", "5", "-", "1"]]
    assert page.rows["Groups"][1:] == [["billing", "orders", "1", "0", "-", str(5 - len(batch))]]
    assert ["broker_messages_in", "5"] in page.rows["Numbers"]


def test_the_status_page_shows_rates_from_the_second_look_on() -> None:
    clock = RunningClock()
    with ServedBroker(MemoryFiles(), status_port=0, clock=clock) as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=1)
        client.admin.create_group("billing", "orders")
        assert rows_of(broker)["Rates"][1] == ["messages in", "-"]
        client.producer().send_many("orders", [dmq.Message(b"x")] * 4000)
        consumer = client.consumer("orders", "billing")
        batch = consumer.pull(2000)
        consumer.ack(batch)
        eventually(lambda: client.admin.lag("orders", "billing").total == 4000 - len(batch))
        clock.advance(3)
        rows = rows_of(broker)
        # The clock runs as well, so the rates are at most these.
        assert rows["Rates"][1][0] == "messages in"
        assert 0 < int(rows["Rates"][1][1]) <= 1333
        assert rows["Topics"][1][:4] == ["orders", "1", "4000", "4000"]
        assert 0 < int(rows["Topics"][1][4]) <= 1333
        assert rows["Groups"][1][:2] == ["billing", "orders"]
        assert 0 < int(rows["Groups"][1][4]) <= 667
        clock.advance(6)
        rows_of(broker)
        clock.advance(6)
        assert rows_of(broker)["Rates"][1] == ["messages in", "0"]


def rows_of(broker: ServedBroker) -> dict[str, list[list[str]]]:
    return Tables(get(broker.server.status_port, "/")[2]).rows


def test_looking_at_an_ordered_group_does_not_disorder_it(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=1)
        client.producer().send_many("orders", [dmq.Message(b"x")] * 5)
        client.admin.create_group("billing", "orders")
        get(broker.server.status_port, "/")
        first = client.consumer("orders", "billing", ordered=True).pull(2, wait=0)
        assert len(first) == 2
        # One lease at a time: other members wait for it.
        assert len(client.consumer("orders", "billing", ordered=True).pull(2, wait=0)) == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "broker.example"])
def test_another_address_than_loopback_needs_insecure(host: str) -> None:
    settings = Settings(broker=BrokerSettings(host=host, port=0, metrics_port=0, telnet_port=None))
    with pytest.raises(NotAllowed, match="--insecure"):
        BrokerServer(settings, files=MemoryFiles())
    BrokerServer(settings, files=MemoryFiles(), insecure=True)
