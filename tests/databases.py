"""Private database servers for tests: MariaDB and PostgreSQL, each on a free port, in a directory of its own.

What always holds: a server that was started here ends here, and leaves no file behind; it never runs as root, which
both refuse or warn of, and never touches a database that is already on the machine.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from dmq.testing.processes import free_port

SECONDS = 60.0
DATABASE = "dmq"
USER = "dmq"
PASSWORD = "s3cret word"  # with a character that a URL must escape


class DatabaseServer:
    """One server. What differs between the kinds is in the methods that raise here."""

    scheme = ""
    ending = signal.SIGTERM
    """The signal that ends it without waiting for clients that are connected."""

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="dmq-db-"))
        self._user = None if os.geteuid() else _other_user()
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self.data = self.folder / "data"
        self._environment = {**os.environ, "TMPDIR": str(self.folder)}  # another may be closed to its user
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where its database is, for `broker.dead_letters_url`."""
        return f"{self.scheme}://{USER}:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{self.port}/{DATABASE}"

    def install(self) -> None:
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    def prepare(self) -> None:
        raise NotImplementedError

    def add_database(self, name: str) -> None:
        """Make another empty database for the same user; dropped before `empty` is called."""
        raise NotImplementedError

    def drop_database(self, name: str) -> None:
        raise NotImplementedError

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def run(self, command: Sequence[str], text: str = "") -> str:
        """Run a program as the server's user; its output."""
        done = subprocess.run(
            self._as_user(command),
            input=text,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=self.folder,
            env=self._environment,
        )
        assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
        return done.stdout

    def _as_user(self, command: Sequence[str]) -> list[str]:
        if self._user is None:
            return [*command]
        entry = pwd.getpwnam(self._user)
        return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups", *command]

    def create(self) -> Self:
        """Make it from nothing, and start it."""
        try:
            self.install()
            self.start()
            self.empty()
        except BaseException:
            self.remove()
            raise
        return self

    def start(self) -> None:
        """Start it, or start it again, on what it had."""
        assert self._process is None, "it is running"
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                self._as_user(self.command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._environment,
            )
        deadline = time.monotonic() + SECONDS
        while not self.is_ready():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                said = (self.folder / "log").read_text(errors="replace")[-2000:]
                self.kill()
                raise AssertionError(f"the database did not start: {said}")
            time.sleep(0.05)

    def empty(self) -> None:
        """Make the database anew, and run it if a test left it dead."""
        if self._process is None:
            self.start()
        self.prepare()

    def kill(self) -> None:
        """End it at once, as a machine that loses its power does; `start` brings it back."""
        process, self._process = self._process, None
        if process is not None:
            # Others of PostgreSQL are in sessions of their own, and serve until they notice that the first is dead.
            children = _children_of(process.pid)
            process.kill()
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            process.wait()

    def stop(self) -> None:
        """End it in good order."""
        if self._process is not None:
            self._process.send_signal(self.ending)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS)
        self.kill()

    def remove(self) -> None:
        """End it, and remove its files. In good order: one that is killed leaves shared memory behind."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.create()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class MariaDb(DatabaseServer):
    """MariaDB, with what is durable left to the page cache: tests kill the process, not the machine."""

    scheme = "mariadb"

    def install(self) -> None:
        self.run(
            [
                _program("mariadb-install-db"),
                "--no-defaults",
                f"--datadir={self.data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                "--skip-name-resolve",
            ]
        )

    def command(self) -> list[str]:
        return [
            _program("mariadbd", "/usr/sbin/mariadbd"),
            "--no-defaults",
            f"--datadir={self.data}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            f"--socket={self.folder}/socket",
            f"--pid-file={self.folder}/pid",
            "--innodb-flush-log-at-trx-commit=2",
            "--innodb-buffer-pool-size=32M",
            "--max-allowed-packet=2M",  # small, so that a message can be too large
            "--character-set-server=latin1",  # ours must not depend on the server's
            "--sql-mode=",
        ]

    def _sql(self, text: str) -> str:
        return self.run([_program("mariadb"), "--no-defaults", "-u", "root", f"--socket={self.folder}/socket"], text)

    def prepare(self) -> None:
        self._sql(
            f"DROP DATABASE IF EXISTS {DATABASE}; CREATE DATABASE {DATABASE};"
            f"CREATE OR REPLACE USER {USER}@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';"
            f"GRANT ALL ON {DATABASE}.* TO {USER}@'127.0.0.1';",
        )

    def add_database(self, name: str) -> None:
        self._sql(f"CREATE DATABASE {name}; GRANT ALL ON {name}.* TO {USER}@'127.0.0.1';")

    def drop_database(self, name: str) -> None:
        self._sql(f"DROP DATABASE {name};")


class PostgreSql(DatabaseServer):
    """PostgreSQL, without fsync for the same reason."""

    scheme = "postgresql"
    ending = signal.SIGINT

    def install(self) -> None:
        self.run(
            [
                _program("initdb", "/usr/lib/postgresql/*/bin/initdb"),
                "--pgdata",
                str(self.data),
                "--auth=scram-sha-256",
                "--username=postgres",
                f"--pwfile={self._password_file()}",
                "--no-sync",
                "--encoding=UTF8",
                "--locale=C.UTF-8",
            ]
        )

    def _password_file(self) -> Path:
        file = self.folder / "password"
        file.write_text(PASSWORD + "\n")
        return file

    def command(self) -> list[str]:
        options = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            "fsync": "off",
            "shared_buffers": "16MB",
            "dynamic_shared_memory_type": "mmap",  # in its directory, which goes with it even if it was killed
        }
        postgres = _program("postgres", "/usr/lib/postgresql/*/bin/postgres")
        return [postgres, "-D", str(self.data), *(f"--{name}={value}" for name, value in options.items())]

    def _sql(self, text: str) -> str:
        psql = _program("psql", "/usr/lib/postgresql/*/bin/psql")
        place = f"host={self.folder} port={self.port} user=postgres password='{PASSWORD}' dbname=postgres"
        return self.run([psql, "-v", "ON_ERROR_STOP=1", "-q", "-d", place], text)

    def is_ready(self) -> bool:
        try:
            self._sql("SELECT 1;")
        except AssertionError:
            return False
        return True

    def prepare(self) -> None:
        self._sql(
            f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE);\n"
            # It stays: it may own other databases.
            f"DO $$ BEGIN CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'; "
            "EXCEPTION WHEN duplicate_object THEN NULL; END $$;\n"
            f"CREATE DATABASE {DATABASE} OWNER {USER};"
        )

    def add_database(self, name: str) -> None:
        self._sql(f"CREATE DATABASE {name} OWNER {USER};")

    def drop_database(self, name: str) -> None:
        self._sql(f"DROP DATABASE {name} WITH (FORCE);")


def _other_user() -> str:
    """Somebody without rights, whom Debian always has."""
    return next(name for name in ("nobody", "daemon") if _known(name))


def _known(name: str) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


def _program(name: str, *places: str) -> str:
    """Where a program is; the newest of several."""
    found = shutil.which(name) or next((path for place in places for path in sorted(glob.glob(place))[-1:]), None)
    assert found is not None, f"{name} is not installed: ./scripts/setup does it"
    return found


KINDS: dict[str, Callable[[], DatabaseServer]] = {"mariadb": MariaDb, "postgresql": PostgreSql}


class DatabaseServers:
    """The servers of one run of tests, each started when it is first asked for."""

    def __init__(self) -> None:
        self._servers: dict[str, DatabaseServer] = {}

    def get(self, kind: str) -> DatabaseServer:
        """A running server with an empty database."""
        server = self._servers.get(kind)
        if server is None:
            server = self._servers[kind] = KINDS[kind]().create()
        server.empty()
        return server

    def remove(self) -> None:
        for server in self._servers.values():
            server.remove()


@pytest.fixture(scope="session")
def database_servers() -> Iterator[DatabaseServers]:
    """MariaDB and PostgreSQL."""
    servers = DatabaseServers()
    try:
        yield servers
    finally:
        servers.remove()


def _children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []
