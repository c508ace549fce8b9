"""A real S3 server for tests: one process for a test run, on a port of its own, with buckets in memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from pyarrow import fs

from tests.patience import PATIENCE_S

_SERVER = """
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
application = DomainDispatcherApplication(create_backend_app)
one_at_a_time = threading.Lock()
def in_turn(environ, respond):
    # Of two conditional writes at once moto lets both succeed, which S3 does not.
    if environ["REQUEST_METHOD"] == "PUT":
        with one_at_a_time:
            return application(environ, respond)
    return application(environ, respond)
server = make_server("127.0.0.1", 0, in_turn, threaded=True, fd=int(sys.argv[1]))
threading.Thread(target=server.serve_forever, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


class StorePort:
    """Where the server of this process listens, before it is started: workers of Spark have the environment that the
    JVM was started with.

    Attributes:
        environment: variables that name it, and credentials.
    """

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.number: int = self.socket.getsockname()[1]
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.number}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }


class ObjectStore:
    """The server, started."""

    def __init__(self, port: StorePort) -> None:
        handle = port.socket.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(handle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[handle],
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.files = fs.S3FileSystem(
            access_key="test",
            secret_key="secret",
            region="us-east-1",
            scheme="http",
            endpoint_override=f"127.0.0.1:{port.number}",
            allow_bucket_creation=True,
        )

    def bucket(self) -> str:
        """The address of a new bucket."""
        name = f"test-{uuid.uuid4().hex}"
        self.files.create_dir(name)
        return f"s3://{name}"

    def paths(self, uri: str) -> list[str]:
        """All objects below an address, relative to it."""
        root = uri.removeprefix("s3://")
        found = self.files.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
        return sorted(info.path.removeprefix(f"{root}/") for info in found if info.type == fs.FileType.File)

    def close(self) -> None:
        """End it: it does when its input ends."""
        self._process.communicate(timeout=PATIENCE_S)


@pytest.fixture(scope="session")
def store_port() -> Iterator[StorePort]:
    """The port, named by this process's environment."""
    port = StorePort()
    before = {name: os.environ.get(name) for name in port.environment}
    os.environ.update(port.environment)
    try:
        yield port
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        port.socket.close()


@pytest.fixture(scope="session")
def object_store(store_port: StorePort) -> Iterator[ObjectStore]:
    """The server, named by this process's environment."""
    store = ObjectStore(store_port)
    try:
        yield store
    finally:
        store.close()
