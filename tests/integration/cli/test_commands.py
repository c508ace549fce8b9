"""The real `dmq` command against a real broker process: what a user types, sees, and gets as an exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmq.cli import main
from dmq.testing.processes import BrokerProcess, free_port, read_line
from tests.patience import PATIENCE_S

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("DMQ_")}


class Done:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def real(*arguments: str, stdin: str | bytes = b"", cwd: Path | None = None, **environ: str) -> Done:
    """The command as a user has it: a process of its own."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("dmq")), *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=300,
        cwd=cwd,
        env={**ENVIRON, **environ},
        check=False,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def dmq(*arguments: str, stdin: str | bytes = b"", cwd: Path | None = None, **environ: str) -> Done:
    """The same without the half second that a process takes to start; what serves or listens to signals gets one."""
    if arguments[0] in ("broker", "dev", "bench") and arguments[1:2] != ("drain",):
        return real(*arguments, stdin=stdin, cwd=cwd, **environ)
    given = io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin)
    out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    saved = dict(os.environ), sys.stdin
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd or Path.cwd()):
        for name in saved[0].keys() - ENVIRON.keys():
            del os.environ[name]
        os.environ.update(environ)
        sys.stdin = io.TextIOWrapper(given)
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
        finally:
            for name in environ:
                del os.environ[name]
            os.environ.update(saved[0])
            sys.stdin = saved[1]
    assert isinstance(code, int)
    return Done(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def check_failure(done: Done, code: int, *words: str) -> None:
    """It ended with this code and one sentence that says these words."""
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    # Beside it a broker may have logged something.
    assert sum(line.startswith("dmq: ") for line in done.err.splitlines()) == 1 or code == 2
    for word in words:
        assert word in done.err


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(arguments=["--auto-create", "--set", "store.body_bytes_max=64KiB"]) as running:
        yield running


@pytest.fixture
def url(broker: BrokerProcess) -> str:
    return broker.url


# --- publishing and reading -------------------------------------------------------------------------------------------


def test_what_was_sent_is_seen_found_and_peeked_at(url: str) -> None:
    sent = real("send", "t-first", "hello", "world", "--key", "k-1", "--property", "a=b", "--url", url)
    assert sent.code == 0, sent.err
    assert len(sent.out.splitlines()) == 3
    tailed = real("tail", "t-first", "--from", "earliest", "--limit", "2", DMQ_URL=url)
    assert sorted(line.split()[-1] for line in tailed.out.splitlines()) == ["hello", "world"]
    assert "key=k-1 a=b" in tailed.out
    found = dmq("find", "--key", "k-1", "--url", url, "--format", "json").json
    assert {message["body"] for message in found} == {"hello", "world"}
    assert dmq("find", "--key", "k-1", "--topic", "t-first", "--limit", "1", "--url", url).out.count("k-1") == 1
    peeked = dmq("peek", "t-first", "--url", url, "--format", "json").json
    assert {message["properties"]["a"] for message in peeked} == {"b"}


def test_a_message_is_found_by_the_id_its_receipt_had(url: str) -> None:
    receipt = dmq("send", "t-id", "x", "--url", url, "--format", "json").json
    (found,) = dmq("find", "--id", receipt["id"], "--url", url, "--format", "json").json
    assert (found["id"], found["body"], found["offset"]) == (receipt["id"], "x", receipt["offset"])


def test_a_dash_stands_for_the_lines_of_stdin(url: str) -> None:
    assert dmq("send", "t-dash", "-", "--url", url, stdin="a\nb\n").code == 0
    shown = json.loads(dmq("peek", "t-dash", "--url", url, "--format", "json").out)
    assert sorted(message["body"] for message in shown) == ["a", "b"]


def test_lines_of_stdin_and_files_become_messages(url: str, tmp_path: Path) -> None:
    assert dmq("send", "t-lines", "--stdin", "--lines", "--url", url, stdin="a\nb\r\n\nc").code == 0
    file = tmp_path / "whole"
    file.write_bytes(b"\xff\x00\nwhole")
    assert dmq("send", "t-lines", "--file", str(file), "--url", url).code == 0
    lines = dmq("tail", "t-lines", "--from", "earliest", "--no-follow", "--format", "json", "--url", url).out
    messages = [json.loads(line) for line in lines.splitlines()]
    assert [message.get("body") for message in messages[:4]] == ["a", "b", "", "c"]
    assert messages[4]["body_base64"] == "/wAKd2hvbGU="


def test_a_topic_is_copied_with_tail_and_send(url: str) -> None:
    dmq("send", "t-from", "one", "--key", "k", "--tag", "red", "--priority", "7", "--url", url)
    copy = dmq("tail", "t-from", "--from", "earliest", "--no-follow", "--format", "json", "--url", url).out
    assert dmq("send", "t-to", "--stdin", "--json-lines", "--url", url, stdin=copy).code == 0
    (message,) = dmq("peek", "t-to", "--url", url, "--format", "json").json
    assert (message["body"], message["key"], message["tag"], message["priority"]) == ("one", "k", "red", 7)


def test_many_messages_give_a_summary(url: str) -> None:
    sent = dmq("send", "t-many", "x" * 100, "--count", "1000", "--durability", "stored", "--url", url)
    assert sent.out.startswith("sent 1,000 messages, 100,000 bytes")
    assert dmq("topic", "show", "t-many", "--url", url, "--format", "json").json["messages"] == 1000


def test_tail_shows_messages_as_they_arrive_and_stops_at_ctrl_c(url: str) -> None:
    dmq("send", "t-live", "before", "--url", url)
    command = [str(Path(sys.executable).with_name("dmq")), "tail", "t-live", "--from", "earliest", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRON) as tail:
        assert tail.stdout is not None
        deadline = time.monotonic() + 120
        assert (read_line(tail.stdout, deadline) or "").endswith("before\n")
        dmq("send", "t-live", "after", "--url", url)
        assert (read_line(tail.stdout, deadline) or "").endswith("after\n")
        tail.send_signal(signal.SIGINT)
        _, err = tail.communicate(timeout=120)
    assert tail.returncode == 130
    assert b"Traceback" not in err


# --- topics and groups ------------------------------------------------------------------------------------------------


def test_a_topic_is_created_listed_changed_and_deleted(url: str) -> None:
    assert dmq("topic", "create", "t-made", "--queues", "2", "--ttl", "7d", "--url", url).code == 0
    assert dmq("topic", "create", "t-made", "--queues", "2", "--ttl", "7d", "--if-missing", "--url", url).code == 0
    check_failure(dmq("topic", "create", "t-made", "--url", url), 1, "t-made")
    (row,) = dmq("topic", "list", "--prefix", "t-made", "--url", url, "--format", "json").json
    assert (row["queues"], row["ttl_seconds"]) == (2, 604800)
    changed = dmq("topic", "update", "t-made", "--queues", "3", "--ttl", "none", "--url", url, "--format", "json").json
    assert (changed["queues"], changed["ttl_seconds"]) == (3, None)
    check_failure(dmq("topic", "delete", "t-made", "--url", url), 2, "--yes")
    assert dmq("topic", "delete", "t-made", "--yes", "--url", url).code == 0
    check_failure(dmq("topic", "show", "t-made", "--url", url), 1, "t-made")
    assert "t-made" not in dmq("topic", "list", "--url", url).out


def test_a_group_is_moved_only_with_execute(url: str) -> None:
    dmq("topic", "create", "t-group", "--queues", "1", "--url", url)
    dmq("send", "t-group", "x", "--count", "10", "--url", url)
    assert dmq("group", "create", "g-moved", "--topic", "t-group", "--url", url).code == 0

    def lag() -> int:
        found: int = dmq("group", "lag", "g-moved", "--url", url, "--format", "json").json["lag"]
        return found

    dry = dmq("group", "skip", "g-moved", "--topic", "t-group", "--by", "4", "--url", url)
    assert (dry.code, lag()) == (0, 10)
    assert "dry run" in dry.out
    for more in ([], ["--by", "4"]):
        wrong = dmq("group", "skip", "g-moved", "--topic", "t-group", "--queue", "9", *more, "--url", url)
        assert wrong.code == 1
        assert "queue" in wrong.err
        assert "not 9" in wrong.err
    dmq("group", "skip", "g-moved", "--topic", "t-group", "--by", "4", "--execute", "--url", url)
    assert lag() == 6
    dmq("group", "reset", "g-moved", "--topic", "t-group", "--to", "earliest", "--url", url)
    assert lag() == 6
    dmq("group", "reset", "g-moved", "--topic", "t-group", "--to", "9", "--execute", "--url", url)
    assert lag() == 1
    shown = dmq("group", "show", "g-moved", "--url", url, "--format", "json").json
    assert (shown["topics"], shown["lag"], shown["queues"][0]["settled_below"]) == (["t-group"], 1, 9)
    assert [
        row["group"] for row in dmq("group", "list", "--topic", "t-group", "--url", url, "--format", "json").json
    ] == ["g-moved"]
    assert dmq("group", "delete", "g-moved", "--yes", "--url", url).code == 0
    check_failure(dmq("group", "lag", "g-moved", "--url", url), 1, "g-moved")


def test_cluster_top_and_doctor_look_at_the_broker(url: str, tmp_path: Path) -> None:
    (row,) = dmq("cluster", "--url", url, "--format", "json").json
    assert (row["state"], row["address"]) == ("running", url.removeprefix("dmq://"))
    seen = dmq("top", "--interval", "0.1", "--url", url, "--format", "json").json
    assert seen["state"] == "running"
    assert "clients" in dmq("top", "--once", "--interval", "0.1", "--url", url).out
    ports = ("--set", "broker.port=0", "--set", "broker.metrics_port=0", "--set", "broker.telnet_port=none")
    checked = dmq("doctor", "--url", url, "--data", str(tmp_path / "data"), *ports, "--format", "json", cwd=tmp_path)
    by_check = {row["check"]: row for row in checked.json}
    assert by_check["broker"]["state"] == "ok"
    assert by_check["version"]["state"] == "ok"
    assert by_check["clock"]["state"] == "ok"


# --- bad input --------------------------------------------------------------------------------------------------------


def test_an_unknown_topic_is_an_error_and_is_not_made_by_looking(url: str) -> None:
    check_failure(real("tail", "t-nosuch", "--url", url), 1, "t-nosuch")
    for command in (("peek",), ("topic", "show"), ("topic", "delete", "--yes")):
        check_failure(dmq(*command, "t-nosuch", "--url", url), 1, "t-nosuch")
    assert "t-nosuch" not in dmq("topic", "list", "--url", url).out


def test_a_wrong_group_is_an_error_and_is_not_made_by_moving_it(url: str) -> None:
    dmq("send", "t-wrong", "x", "--url", url)
    check_failure(dmq("group", "show", "g-nosuch", "--url", url), 1, "g-nosuch")
    for command in (("lag",), ("reset", "--to", "latest", "--execute"), ("skip", "--execute")):
        check_failure(dmq("group", *command, "g-nosuch", "--topic", "t-wrong", "--url", url), 1, "g-nosuch")
    assert "g-nosuch" not in dmq("group", "list", "--url", url).out


def test_a_body_that_is_too_large_is_an_error_that_names_the_limit(url: str) -> None:
    check_failure(real("send", "t-large", "--stdin", "--url", url, stdin=os.urandom(100_000)), 2, "65536")


def test_a_bad_json_line_is_named_and_what_came_before_it_is_sent(url: str) -> None:
    done = dmq("send", "t-bad", "--stdin", "--json-lines", "--url", url, stdin='{"body": "a"}\nnonsense\n')
    check_failure(done, 2, "stdin, line 2", "not JSON", "1 message was sent before that")
    assert dmq("topic", "show", "t-bad", "--url", url, "--format", "json").json["messages"] == 1
    lines = '{"body": "a"}\n{"body": "b", "priority": 12}\n'
    done = dmq("send", "t-bad", "--stdin", "--json-lines", "--url", url, stdin=lines)
    check_failure(done, 2, "priority is 0 to 9", "1 message was sent before that")
    assert "flushed" in done.out


@pytest.mark.parametrize(
    "wrong", ["localhost:9611", "http://127.0.0.1:9611", "dmq://", "dmq://host:port", "dmq://h/path"]
)
def test_a_wrong_url_is_an_error_that_says_how_to_write_one(wrong: str) -> None:
    check_failure(dmq("topic", "list", "--url", wrong), 2, "dmq://" if wrong != "dmq://host:port" else "1 to 65535")


def test_no_broker_is_exit_code_3() -> None:
    address = f"127.0.0.1:{free_port()}"
    check_failure(real("topic", "list", "--url", f"dmq://{address}"), 3, address, "start a broker")


def test_doctor_says_what_to_do_when_no_broker_answers(tmp_path: Path) -> None:
    done = dmq("doctor", "--url", f"dmq://127.0.0.1:{free_port()}", "--data", str(tmp_path), cwd=tmp_path)
    assert done.code == 1
    assert "dmq dev starts one" in done.out
    assert list(tmp_path.iterdir()) == []


def serve_once(answer: bytes) -> tuple[int, threading.Thread]:
    """A server that says the same to everybody; ends after one connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server:
            server.settimeout(30)
            sock, _ = server.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(answer)
                sock.settimeout(10)
                sock.recv(1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return server.getsockname()[1], thread


def test_garbage_on_the_port_is_an_error_that_guesses_who_speaks() -> None:
    port, thread = serve_once(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    check_failure(dmq("topic", "list", "--url", f"dmq://127.0.0.1:{port}"), 1, "not the DMQ protocol")
    thread.join(PATIENCE_S)


def test_a_broker_of_another_version_is_an_error_that_says_to_upgrade() -> None:
    from dmq.errors import VersionMismatch
    from dmq.protocol import Command, error_frame

    refusal = error_frame(
        VersionMismatch("this broker speaks protocol 9 only: upgrade the older side"), Command.NONE, 0
    )
    port, thread = serve_once(refusal)
    check_failure(dmq("topic", "list", "--url", f"dmq://127.0.0.1:{port}"), 1, "upgrade the older side")
    thread.join(PATIENCE_S)


def test_a_port_that_is_taken_is_an_error_that_names_it(broker: BrokerProcess, tmp_path: Path) -> None:
    port = broker.url.rpartition(":")[2]
    done = dmq(
        "broker", "--data", str(tmp_path / "data"), "--port", port, "--metrics-port", "0", "--telnet-port", "none"
    )
    check_failure(done, 1, f"port {port}", "choose another port")


def test_a_directory_in_use_is_an_error(broker: BrokerProcess) -> None:
    done = dmq("broker", "--data", str(broker.folder), "--port", "0", "--metrics-port", "0", "--telnet-port", "none")
    check_failure(done, 1, "in use", str(broker.pid))


def test_a_directory_that_cannot_be_made_is_an_error_and_no_traceback() -> None:
    done = dmq("broker", "--data", "/proc/dmq", "--port", "0", "--metrics-port", "0", "--telnet-port", "none")
    check_failure(done, 1, "could not create /proc/dmq")


def test_an_address_for_strangers_needs_insecure(tmp_path: Path) -> None:
    done = dmq("dev", "--host", "0.0.0.0", "--port", "0", "--data", str(tmp_path / "data"))
    check_failure(done, 1, "--insecure")
    assert not (tmp_path / "data").exists()


def test_an_unknown_or_bad_setting_is_named_with_its_source(tmp_path: Path) -> None:
    check_failure(
        dmq("broker", cwd=tmp_path, DMQ_BROKER_PROT="1"), 2, "DMQ_BROKER_PROT", "did you mean DMQ_BROKER_PORT?"
    )
    check_failure(dmq("broker", "--set", "broker.port=many", cwd=tmp_path), 2, "broker.port", "many")
    (tmp_path / "dmq.toml").write_text("[broker]\nprot = 1\n")
    check_failure(dmq("broker", cwd=tmp_path), 2, "broker.prot", "dmq.toml", "did you mean broker.port?")
    check_failure(dmq("config", "show", "--config", "nosuch.toml", cwd=tmp_path), 2, "nosuch.toml")


def test_config_show_tells_where_each_setting_came_from(tmp_path: Path) -> None:
    (tmp_path / "dmq.toml").write_text('[store]\nsegment_bytes = "64MiB"\n')
    shown = dmq(
        "config", "show", "--changed", "--set", "broker.name=b1", "--format", "json", cwd=tmp_path, DMQ_BROKER_PORT="7"
    ).json
    assert {(row["key"], row["value"], row["source"]) for row in shown} == {
        ("store.segment_bytes", "64MiB", "dmq.toml"),
        ("broker.port", "7", "environment DMQ_BROKER_PORT"),
        ("broker.name", "b1", "flag broker.name"),
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("send", "t"),
        ("send", "t", "x", "--ordered"),
        ("send", "t", "--stdin", "--lines", "--json-lines"),
        ("send", "t", "x", "--property", "nonsense"),
        ("send", "t", "x", "--durability", "eternal"),
        ("send", "t", "x", "--priority", "11"),
        ("tail", "t", "--from", "yesterday"),
        ("find",),
        ("find", "--key", "k", "--id", "i"),
        ("find", "--id", "nonsense"),
        ("group", "reset", "g", "--topic", "t"),
        ("topic", "update", "t"),
        ("topic", "create"),
        ("bench", "produce", "--size", "0"),
        ("bench", "produce", "--async", "--connections", "5"),
        ("bench", "produce", "--threads", "2", "--connections", "5"),
    ],
)
def test_a_wrong_call_is_exit_code_2_before_anybody_is_asked(arguments: tuple[str, ...]) -> None:
    # There is no broker at that address: had it been asked for, the code would be 3.
    done = dmq(*arguments, DMQ_URL=f"dmq://127.0.0.1:{free_port()}")
    check_failure(done, 2)
    assert "Usage: dmq" in done.err


# --- dev, bench, demo -------------------------------------------------------------------------------------------------


def test_dev_serves_a_page_makes_topics_and_keeps_its_data(tmp_path: Path) -> None:
    from urllib.request import urlopen

    with BrokerProcess(tmp_path / "data", ["--console-port", "0"], command="dev") as dev:
        assert dmq("send", "hello", "my first message", "--url", dev.url).code == 0
        with urlopen(dev.page, timeout=120) as answer:
            page = answer.read().decode()
        assert "hello" in page
        assert dev.stop() == 0
    with BrokerProcess(tmp_path / "data", ["--console-port", "0"], command="dev") as dev:
        tailed = dmq("tail", "hello", "--from", "earliest", "--no-follow", "--url", dev.url)
        assert tailed.out.endswith("my first message\n")


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("arguments", "figure"),
    [
        (("produce", "--messages", "1000", "--rounds", "1"), "send_many by 500, 200 B, stored"),
        (
            ("produce", "--messages", "1000", "--rounds", "1", "--threads", "2", "--batch", "100"),
            "send_many by 100 in 2 threads, 200 B, stored",
        ),
        (("produce", "--messages", "200", "--rounds", "1", "--async"), "send_async, 200 B, stored"),
        (
            ("produce", "--messages", "200", "--rounds", "1", "--connections", "5"),
            "5 connections, one message at a time, 200 B, stored",
        ),
        (("consume", "--messages", "1000", "--rounds", "1"), "pull and ack by 500, 200 B"),
        (("consume", "--messages", "500", "--rounds", "1", "--push"), "a handler for each, 200 B"),
        (("store", "--messages", "1000", "--rounds", "1", "--durability", "flushed"), "append by 500, 200 B, flushed"),
        (("latency", "--messages", "60", "--body", "text"), "a bare echo"),
    ],
)
def test_bench_measures_and_leaves_nothing_behind(tmp_path: Path, arguments: tuple[str, ...], figure: str) -> None:
    done = dmq("bench", *arguments, "--format", "json", TMPDIR=str(tmp_path))
    assert done.code == 0, done.err
    figures = done.json["figures"]
    assert figures[0]["name"] == figure
    assert {"machine", "settings"} < done.json.keys()
    assert done.json["settings"]["body"] == ("text" if "text" in arguments else "json")
    if arguments[0] == "latency":
        assert all({"p50_us", "p99_us", "p999_us"} < one.keys() for one in figures)
        assert [one["name"] for one in figures if "broker_us_per_message" in one] == [
            "send, stored (beside the echo)",
            "send, flushed (beside the echo and fdatasync)",
            "send to handler at 1,000 a second (beside the relay)",
        ]
    else:
        assert {"of_floor", "floor_messages_per_second", "client_us_per_message"} < figures[0].keys()
        assert ("p999_us" in figures[0]) == (figure.startswith("send_many"))
    assert list(tmp_path.iterdir()) == []


def test_a_bench_that_is_killed_takes_its_broker_along(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dmq.cli", "bench", "produce", "--messages", "10000000", "--size", "10"]
    with subprocess.Popen(command, env={**ENVIRON, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE) as bench:
        deadline = time.monotonic() + 120
        while not children_of(bench.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        children = children_of(bench.pid)
        assert children
        time.sleep(1.0)
        bench.terminate()
        bench.communicate(timeout=120)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert list(tmp_path.iterdir()) == []


def test_the_tour_shows_what_happened_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "dmq.cli.process.tour", "--once"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRON, "TMPDIR": str(tmp_path)},
    ) as tour:
        try:
            out, err = tour.communicate(timeout=900)
        finally:
            tour.terminate()  # if the test is interrupted: killed, it would leave its broker behind
    assert (tour.returncode, err) == (0, "")
    assert "Published 10,000 orders" in out
    assert "Its lag is now 0." in out
    assert "200 payments came back, 200 different ones" in out
    assert list(tmp_path.iterdir()) == []
