"""A tour for newcomers, behind `./scripts/demo`: start DMQ, publish, consume, look something up, archive it all with
Spark, kill the leader of a shard, and say what happened.

What always holds: it runs on free ports and a directory of its own; in the end no process and no file is left.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dmq.cli.process.server_process import set_up_logs
from dmq.errors import DMQError
from dmq.settings import LogSettings

if TYPE_CHECKING:
    from dmq.client.client import Client

__all__ = ["main"]

MESSAGES = 10_000
_BATCH = 500
_CONSUME_SECONDS_MAX = 60.0
_KILLED_AFTER = 100  # so many payments, and so many again
_ACCOUNTS = 5


def main(arguments: list[str] | None = None) -> int:
    """Run the tour; returns the exit code."""
    parser = argparse.ArgumentParser(prog="./scripts/demo", description="A tour of DMQ in a minute.")
    parser.add_argument("--once", action="store_true", help="end by itself, instead of keeping the status page open")
    once = parser.parse_args(arguments).once
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    set_up_logs(LogSettings(level="error"))  # that a leader is lost and found is part of the tour
    try:
        tour(once)
    except KeyboardInterrupt:
        say("\nStopped.")
    except DMQError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def say(text: str) -> None:
    """A line at once, also in a pipe."""
    print(text, flush=True)


def tour(once: bool) -> None:
    """Run all steps."""
    import dmq
    from dmq.testing.processes import BrokerProcess

    with (
        tempfile.TemporaryDirectory(prefix="dmq-demo-") as folder,
        BrokerProcess(command="dev", arguments=["--console-port", "0"]) as broker,
    ):
        say(f"1. Started DMQ in one process, on an empty directory. It listens on {broker.url}")
        with dmq.connect(broker.url, app="demo") as client:
            client.admin.create_topic("orders", queues=4)
            client.admin.create_group("billing", "orders")
            say('2. Created the topic "orders", with 4 queues, and the consumer group "billing".')
            publish(client)
            consume(client)
            found = look_up(client)
        page = archive(broker.url, Path(folder), found)
        replicate(Path(folder) / "shard")
        if once:
            say("Done. Everything is gone again: the process and its directories.")
            return
        say(f"\nSee it for yourself: the broker at {broker.page}, the report at {page.as_uri()}")
        say("Ctrl-C ends the demo and removes everything.")
        while True:
            time.sleep(3600)


def publish(client: Client) -> None:
    """Publish orders, each safe on disk before it counts."""
    from dmq.model import Message

    dice = random.Random(1)
    orders = [
        Message(
            json.dumps({"order": number, "customer": dice.randrange(500), "amount": dice.randrange(100, 99_999) / 100})
            .encode(),
            key=f"order-{number}",
            tag="created",
        )
        for number in range(MESSAGES)
    ]  # fmt: skip
    began = time.monotonic()
    with client.producer() as producer:
        for at in range(0, MESSAGES, _BATCH):
            producer.send_many("orders", orders[at : at + _BATCH], durability="flushed")
    seconds = time.monotonic() - began
    lag = client.admin.lag("orders", "billing").total
    say(
        f"3. Published {MESSAGES:,} orders in {seconds:.2f} s, {MESSAGES / seconds:,.0f} a second. Every one was on "
        f'disk before it counted.\n   "billing" has not seen any: its lag is {lag:,}.'
    )


def consume(client: Client) -> None:
    """Consume them with a group."""
    total = 0.0
    seen: set[str | None] = set()
    began = time.monotonic()
    with client.consumer("orders", group="billing") as consumer:
        while len(seen) < MESSAGES and time.monotonic() - began < _CONSUME_SECONDS_MAX:
            batch = consumer.pull(max_messages=_BATCH, wait=2.0)
            for message in batch:
                total += json.loads(message.body)["amount"]
                seen.add(message.key)
            consumer.ack(batch)
    seconds = time.monotonic() - began
    lag = client.admin.lag("orders", "billing").total
    say(
        f'4. "billing" consumed {len(seen):,} orders worth {total:,.2f} in {seconds:.2f} s, '
        f"{len(seen) / seconds:,.0f} a second, and acknowledged them.\n   Its lag is now {lag:,}."
    )
    if len(seen) != MESSAGES or lag:
        raise DMQError(f"{MESSAGES - len(seen):,} orders are missing and the lag is {lag:,}: this should not happen")


def look_up(client: Client) -> str:
    """Find one by its key, and return its id: consumed messages stay until retention takes them."""
    (found,) = client.admin.find("orders", key="order-4711")
    say(f'5. Messages stay after they were consumed. "order-4711" is in queue {found.queue} at offset {found.offset}:')
    say(f"   {found.body.decode()}")
    return str(found.id)


def archive(url: str, folder: Path, message_id: str) -> Path:
    """Archive everything with Spark, ask the archive, and make the report; returns its page."""
    tables, page = str(folder / "archive"), folder / "report.html"
    say("6. Archiving it all with Spark, into tables that any engine reads. Starting Spark takes some seconds …")
    run_dmq("archive", "run", "--broker", url, "--tables", tables)
    say("7. The archive answers without Spark, from now on also when the broker has forgotten:")
    run_dmq("archive", "query", "--tables", tables, "--id", message_id, "--trace")
    say("8. And it makes a report, as text and as a page with charts:")
    run_dmq("archive", "report", "--tables", tables)
    run_dmq("archive", "report", "--tables", tables, "--format", "html", "--output", str(page))
    return page


def replicate(folder: Path) -> None:
    """Run a shard of three brokers, kill its leader while somebody sends, and count."""
    import dmq
    from dmq.testing.processes import DevClusterProcess

    say("9. Starting a shard: three brokers that keep every message, and a name server, each a process …")
    with DevClusterProcess(folder) as shard, dmq.connect(shard.url, app="demo", timeout=60) as client:
        for row in shard.rows:
            say(f"   {row['name']:<10}  {row['role']:<10}  port {row['port']}, pid {row['pid']}")
        client.admin.create_topic("payments")
        with client.producer(timeout=60) as producer:

            def pay(number: int) -> None:
                account = f"account-{number % _ACCOUNTS}"
                producer.send("payments", b"%d" % number, business_id=account, ordered=True, durability="replicated")

            for number in range(_KILLED_AFTER):
                pay(number)
            killed, began = shard.kill_leader(), time.monotonic()
            for number in range(_KILLED_AFTER, 2 * _KILLED_AFTER):
                pay(number)
                if number == _KILLED_AFTER:
                    seconds = time.monotonic() - began
        found: list[int] = []
        with client.consumer("payments", group="ledger", ordered=True) as consumer:
            while len(found) < 2 * _KILLED_AFTER and (batch := consumer.pull(wait=5.0)):
                found += [int(message.body) for message in batch]
                consumer.ack(batch)
        leader = client.admin.shard().leader
    accounts = [[number for number in found if number % _ACCOUNTS == account] for account in range(_ACCOUNTS)]
    say(
        f"   Sent {_KILLED_AFTER} payments, killed {killed} and sent {_KILLED_AFTER} more, of which the first took "
        f"{seconds:.1f} s: {leader} leads now.\n   {len(found)} payments came back, {len({*found})} different ones, "
        f"those of each of {_ACCOUNTS} accounts in the order they were made. Nothing is lost."
    )
    if any(payments != sorted(payments) for payments in accounts):
        raise DMQError("the payments of an account came back in another order: this should not happen")
    if sorted(found) != [*range(2 * _KILLED_AFTER)]:
        raise DMQError(f"{len(found)} payments came back of {2 * _KILLED_AFTER}: this should not happen")


def run_dmq(*arguments: str) -> None:
    """Run a command as a user would, and show it with what it prints."""
    say(f"   $ dmq {' '.join(arguments)}")
    ended = subprocess.run(
        [sys.executable, "-m", "dmq.cli", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    for line in ended.stdout.splitlines():
        say(f"   {line}".rstrip())
    if ended.returncode:
        raise DMQError(f"dmq {' '.join(arguments[:2])} failed: {ended.stderr.strip() or ended.returncode}")


if __name__ == "__main__":
    sys.exit(main())
