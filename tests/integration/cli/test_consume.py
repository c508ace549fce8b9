"""`dmq consume`, completion of names, and what commands say about mistakes, against a broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import dmq as client_side
from dmq.testing.processes import BrokerProcess
from tests.integration.cli.test_commands import Done
from tests.integration.cli.test_commands import dmq as run
from tests.patience import eventually


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(
        command="dev", arguments=["--console-port", "0", "--set", "broker.auto_create=false"]
    ) as running:
        yield running


def dmq(broker: BrokerProcess, *arguments: str, stdin: str = "") -> Done:
    return run(*arguments, "--url", broker.url, stdin=stdin)


def lag(broker: BrokerProcess, topic: str, group: str) -> tuple[int, int]:
    with client_side.connect(broker.url) as client:
        found = client.admin.lag(topic, group)
        return found.total, found.retrying


def test_what_a_group_has_not_consumed_is_printed_and_acknowledged(broker: BrokerProcess) -> None:
    dmq(broker, "topic", "create", "letters")
    dmq(broker, "send", "letters", "--stdin", "--lines", "--key", "k", stdin="a\nb\nc\n")
    first = dmq(broker, "consume", "letters", "--group", "one", "--count", "2", "--format", "body")
    rest = dmq(broker, "consume", "letters", "--group", "one", "--format", "json")
    assert first.out.count("\n") == 2
    row = json.loads(rest.out)
    assert sorted([*first.out.split(), row["body"]]) == ["a", "b", "c"]
    assert (row["topic"], row["key"], row["attempt"]) == ("letters", "k", 1)
    assert lag(broker, "letters", "one") == (0, 0)
    assert dmq(broker, "consume", "letters", "--group", "one").out == ""
    assert dmq(broker, "consume", "letters", "--group", "late", "--from", "latest").out == ""
    assert "key=k" in dmq(broker, "consume", "letters", "--group", "two").out


def test_a_program_gets_the_body_and_its_exit_code_settles_the_message(
    broker: BrokerProcess, tmp_path: os.PathLike[str]
) -> None:
    body = "x" * 200_000  # more than a pipe holds
    dmq(broker, "topic", "create", "jobs")
    dmq(broker, "send", "jobs", "--stdin", "--lines", "--key", "k-1", "--property", "a=b", stdin=f"{body}\nbad\n")
    told = os.path.join(tmp_path, "told")
    script = (
        f'body=$(cat); echo "$MESSAGE_TOPIC $MESSAGE_KEY $MESSAGE_ATTEMPT $MESSAGE_PROPERTIES ${{#body}}" >>{told}; '
    )
    done = dmq(broker, "consume", "jobs", "--group", "one", "--exec", script + '[ "$body" != bad ]')
    assert done.code == 1
    assert "1 of 2 messages failed and are delivered again later" in done.err
    with open(told) as stream:
        assert sorted(stream.read().splitlines()) == ['jobs k-1 1 {"a": "b"} 200000', 'jobs k-1 1 {"a": "b"} 3']
    assert lag(broker, "jobs", "one") == (0, 1)
    # A program that reads nothing, and one that is killed.
    assert dmq(broker, "consume", "jobs", "--group", "two", "--count", "1", "--exec", "exit 0").code == 0
    assert dmq(broker, "consume", "jobs", "--group", "two", "--exec", "kill -9 $$").code == 1
    assert lag(broker, "jobs", "two") == (0, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_nothing_printed_comes_again(broker: BrokerProcess, number: int) -> None:
    topic = f"follow-{number}"
    dmq(broker, "topic", "create", topic)
    dmq(broker, "send", topic, "first")
    command = [sys.executable, "-m", "dmq.cli", "consume", topic, "--group", "g", "--follow", "--format", "body"]
    with subprocess.Popen([*command, "--url", broker.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        dmq(broker, "send", topic, "second")
        assert process.stdout.readline() == b"second\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    deadline = time.monotonic() + 30
    while lag(broker, topic, "g") != (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SIGNALLED = """
import os
from dmq.cli import main
from dmq.cli.message import consume
show = consume._show
def show_and_be_told(*arguments):
    show(*arguments)
    os.kill(os.getpid(), int(os.environ["NUMBER"]))
consume._show = show_and_be_told
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_the_print_and_its_ack_waits_for_the_ack(broker: BrokerProcess, number: int) -> None:
    topic = f"between-{number}"
    dmq(broker, "topic", "create", topic)
    dmq(broker, "send", topic, "first")
    words = ["consume", topic, "--group", "g", "--follow", "--format", "body", "--url", broker.url]
    environ = {**os.environ, "NUMBER": str(int(number))}
    done = subprocess.run([sys.executable, "-c", SIGNALLED, *words], capture_output=True, env=environ, check=False)
    assert (done.returncode, done.stdout) == (130, b"first\n"), done.stderr
    assert lag(broker, topic, "g") == (0, 0)


def test_a_signal_ends_it_though_nobody_reads_what_it_prints(broker: BrokerProcess) -> None:
    dmq(broker, "topic", "create", "unread")
    with client_side.connect(broker.url) as client:
        client.admin.create_group("g", "unread")
        client.producer().send("unread", b"x" * 200_000)  # more than a pipe holds
    words = ["consume", "unread", "--group", "g", "--follow", "--format", "body", "--url", broker.url]
    with subprocess.Popen([sys.executable, "-m", "dmq.cli", *words], stdout=subprocess.PIPE) as process:
        with client_side.connect(broker.url) as client:
            eventually(lambda: any(queue.leased for queue in client.admin.lag("unread", "g").queues))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    assert lag(broker, "unread", "g") == (1, 0)


@pytest.mark.parametrize(
    "command", [["tail", "--from", "earliest"], ["consume", "--follow", "--group", "heads"]], ids=" ".join
)
def test_it_ends_without_a_word_when_its_reader_is_gone_though_no_message_comes(
    broker: BrokerProcess, command: list[str]
) -> None:
    with client_side.connect(broker.url) as client:
        client.admin.create_topic("heads", allow_existing=True)
        client.producer().send("heads", b"one")
    words = [sys.executable, "-m", "dmq.cli", command[0], "heads", *command[1:], "--url", broker.url]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert b"one" in process.stdout.readline()
            process.stdout.close()
            assert process.wait(60) == 1
            assert process.stderr.read() == b""
        finally:
            process.kill()


def complete(broker: BrokerProcess, words: str) -> list[str]:
    environ = {**os.environ, "_DMQ_COMPLETE": "complete_bash", "COMP_WORDS": words, "DMQ_URL": broker.url}
    environ["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run([sys.executable, "-m", "dmq.cli"], capture_output=True, text=True, env=environ, check=False)
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_topics_and_groups_of_the_broker(broker: BrokerProcess) -> None:
    with client_side.connect(broker.url) as client:
        client.admin.create_topic("orders")
        client.admin.create_topic("orders-old")
        client.admin.create_group("billing", "orders")
        client.admin.create_group("audit", "orders-old")
    assert complete(broker, "dmq peek ord") == ["orders", "orders-old"]
    assert complete(broker, "dmq consume orders --group bil") == ["billing"]
    assert complete(broker, "dmq group reset billing --topic orders-") == ["orders-old"]
    assert complete(broker, "dmq peek --url dmq://127.0.0.1:1 ord") == []


def test_a_topic_that_exists_otherwise_is_told_with_what_differs(broker: BrokerProcess) -> None:
    dmq(broker, "topic", "create", "bills", "--queues", "2", "--ttl", "1h")
    assert dmq(broker, "topic", "create", "bills", "--queues", "2", "--ttl", "1h", "--if-missing").code == 0
    done = dmq(broker, "topic", "create", "bills", "--queues", "3", "--if-missing")
    assert (done.code, done.err) == (
        1,
        "dmq: topic 'bills' already exists with other settings: queues is 2, not 3, ttl is 3600 s, not none; ask for "
        "those it has, or update it\n",
    )


# The same mistake, made with whatever command can make it.
MISTAKES = {
    "a name that cannot be": (
        2,
        [
            ["topic", "create", "a b"],
            ["topic", "show", "a b"],
            ["topic", "delete", "a b", "--yes"],
            ["send", "a b", "x"],
            ["peek", "a b"],
            ["tail", "a b", "--no-follow"],
            ["consume", "a b", "--group", "g"],
            ["consume", "bills", "--group", "a b"],
            ["group", "create", "a b", "--topic", "bills"],
            ["group", "create", "g", "--topic", "a b"],
            ["limit", "set", "--topic", "a b", "--messages", "1"],
        ],
    ),
    "no message id": (
        2,
        [["why", "nosuch"], ["trace", "nosuch"], ["find", "--id", "nosuch"], ["dlq", "show", "nosuch"],
         ["dlq", "resend", "nosuch"], ["dlq", "delete", "nosuch"], ["delay", "cancel", "nosuch"]],
    ),
    "no filter": (
        2,
        [[*command, "--tags", tags] for tags in ("||", "a && b", "a | b", "a ||")
         for command in (["peek", "bills"], ["tail", "bills", "--no-follow"], ["consume", "bills", "--group", "g"])],
    ),
    "no time": (
        2,
        [["send", "bills", "x", "--delay", "soon"], ["send", "bills", "x", "--ttl", "soon"],
         ["send", "bills", "x", "--delay", "1000d"], ["topic", "create", "a", "--ttl", "soon"],
         ["dlq", "list", "--since", "tomorrow"], ["peek", "bills", "--from", "tomorrow"],
         ["tail", "bills", "--from", "tomorrow"], ["consume", "bills", "--group", "g", "--from", "tomorrow"],
         ["consume", "bills", "--group", "g", "--lease", "soon"]],
    ),
    "what is not there": (
        1,
        [["topic", "show", "nosuch"], ["topic", "delete", "nosuch", "--yes"],
         ["topic", "update", "nosuch", "--queues", "9"], ["peek", "nosuch"], ["tail", "nosuch", "--no-follow"],
         ["limit", "set", "--topic", "nosuch", "--messages", "1"],
         ["group", "show", "nosuch"], ["group", "lag", "nosuch"], ["group", "delete", "nosuch", "--yes"],
         ["group", "reset", "nosuch", "--topic", "bills", "--to", "latest"], ["dlq", "show", "7"],
         ["dlq", "resend", "000000000000e0000000000004"], ["why", "000000000000e0000000000004"],
         ["trace", "000000000000e0000000000004"], ["find", "--id", "000000000000e0000000000004"],
         ["delay", "cancel", "000000000000e0000000000004"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_same_mistake_has_the_same_exit_code(broker: BrokerProcess, mistake: str) -> None:
    with client_side.connect(broker.url) as client:
        client.admin.create_topic("bills", 2, ttl=3600, allow_existing=True)
    expected, calls = MISTAKES[mistake]
    for call in calls:
        done = dmq(broker, *call)
        assert done.code == expected, (call, done.out, done.err)
        # `find` says in its result that there is nothing.
        assert done.err or call[0] == "find", call
        assert "Traceback" not in done.err
