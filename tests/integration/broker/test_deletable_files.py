"""What the guide lets people delete from a data directory can be deleted: everything is there again. (J-10)"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import dmq
from dmq.testing.processes import BrokerProcess
from tests.integration.dead_letters.letters import drained, rejected

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "when-things-go-wrong.md"


def allowed() -> list[str]:
    """The names of the files and folders that a row of the page says may be deleted."""
    rows = [line.split("|") for line in PAGE.read_text().partition("## What may be deleted")[2].splitlines()]
    return [
        name.strip("/")
        for row in rows
        if len(row) == 5 and row[3].strip().startswith(("yes", "need not be"))
        for name in re.findall(r"`([^`]+)`", row[1])
    ]


def test_what_the_guide_lets_delete_is_found_again_dead_letters_included(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    command = next(line for line in PAGE.read_text().splitlines() if line.startswith("cd /var/lib/dmq && rm -rf"))
    assert {"checkpoint", "queue", "runs", "index", "delay", "offset", "ballast", "salvage"} <= set(allowed())
    assert set(command.split()[5:]) <= set(allowed())
    broker = BrokerProcess(folder).start()
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=1)
        rejected(client, 3)
        letters = {letter.id for letter in drained(client, 3)}
        sent = [client.producer().send("orders", b"%d" % n).id for n in range(5)]
        client.producer().send("orders", b"later", delay=3600.0)
    assert broker.stop() == 0
    subprocess.run(["sh", "-c", command.replace("/var/lib/dmq", str(folder))], check=True)
    subprocess.run(["rm", "-rf", *(str(folder / name) for name in allowed())], check=True)
    broker.start()
    with dmq.connect(broker.url, app="shop") as client:
        assert {letter.id for letter in client.admin.dead_letters()} == letters
        with client.consumer("orders", group="billing") as consumer:
            assert [message.id for message in consumer.pull(10, wait=10.0)] == sent
        assert len(list(client.admin.delays())) == 1
    broker.stop()
