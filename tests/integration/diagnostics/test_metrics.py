"""What a broker shows of itself: metrics for machines, health for orchestrators, a page for people."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

import dmq
from dmq.broker.server import BrokerServer
from dmq.errors import NotAllowed
from dmq.settings import BrokerSettings, Settings
from dmq.testing import MemoryFiles
from dmq.testing.clock import RunningClock
from tests.integration.broker_thread import ServedBroker
from tests.patience import eventually

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (-?[0-9.e+-]+|NaN)')


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


def metrics(broker: ServedBroker) -> dict[str, float]:
    """The samples of the metrics page, each checked for its form."""
    status, kind, text = get(broker.server.metrics_port, "/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    assert text.endswith("\n")
    types: dict[str, str] = {}
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, of = line.split(" ")
            assert name not in types, f"{name} is declared twice"
            types[name] = of
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        name = found[1]
        assert types[name] in ("counter", "gauge"), f"{name} has no type before it"
        assert (types[name] == "counter") == name.endswith("_total")
        series = line.rpartition(" ")[0]
        assert series not in samples, f"{series} is there twice"
        samples[series] = float(found[3])
    return samples


def test_metrics_are_prometheus_text_and_count_what_happens(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.producer().send_many("orders", [dmq.Message(b"x")] * 10)
        batch = client.consumer("orders", "billing").pull(4)
        batch.ack()
        eventually(lambda: metrics(broker)["dmq_broker_acked_total"] == len(batch))
        shown = metrics(broker)
        assert shown["dmq_broker_messages_in_total"] == 10
        assert shown["dmq_broker_delivered_total"] == len(batch)
        assert shown["dmq_broker_sessions"] == 1
        assert shown['dmq_group_lag{topic="orders",group="billing"}'] == 10 - len(batch)
        assert shown["dmq_store_failed"] == 0


def test_counters_do_not_fall_when_a_group_or_a_topic_goes(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.producer().send("orders", b"x")
        client.consumer("orders", "billing", auto_ack=True).pull(1)
        before = metrics(broker)["dmq_broker_delivered_total"]
        assert before == 1
        client.admin.delete_topic("orders")
        assert metrics(broker)["dmq_broker_delivered_total"] == before


def test_the_lag_of_a_group_is_shown_before_its_consumers_are_back(broker: ServedBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.producer().send("orders", b"x")
        client.admin.create_group("billing", "orders")
    broker.restart()
    assert metrics(broker)['dmq_group_lag{topic="orders",group="billing"}'] == 1


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
        assert metrics(broker)["dmq_broker_out"] == 1
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
