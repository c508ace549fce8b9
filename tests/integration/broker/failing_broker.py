"""`dmq broker` on a disk whose flushes fail once a line has come on stdin: `python failing_broker.py`."""

from __future__ import annotations

import sys
import threading

from dmq.broker.server import BrokerServer, run
from dmq.cli import main
from dmq.cli.options import make_app
from dmq.cli.process.broker import _announce
from dmq.cli.process.server_process import set_up_logs
from dmq.settings import BrokerSettings, LogSettings, Settings
from dmq.testing import MemoryFiles

app = make_app("Run a broker on a failing disk.")


@app.command()
def broker() -> None:
    files = MemoryFiles()

    def fail_when_told() -> None:
        sys.stdin.readline()
        files.fail("sync", lambda path, number: True)
        print("failing", flush=True)

    threading.Thread(target=fail_when_told, daemon=True).start()
    set_up_logs(LogSettings())
    settings = Settings(broker=BrokerSettings(port=0, metrics_port=0, telnet_port=None, auto_create=True))
    run(lambda: BrokerServer(settings, files=files).serve(_announce))


if __name__ == "__main__":
    main(["broker"], {"broker": ("tests.integration.broker.failing_broker", "Run it.")})
