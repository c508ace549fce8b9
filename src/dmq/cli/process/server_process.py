"""What `dmq dev` and `dmq broker` share: settings from all sources, logs, and a broker until a signal comes."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.options import parse_pairs
from dmq.event_log import EventLine

if TYPE_CHECKING:
    from dmq.broker.server import BrokerServer
    from dmq.settings import LogSettings, ResolvedSettings

__all__ = [
    "DataFolder",
    "Host",
    "Insecure",
    "LogFormat",
    "LogLevel",
    "LogLevelOption",
    "Logs",
    "MetricsPort",
    "Port",
    "TelnetPort",
    "log_flags",
    "log_settings",
    "resolve",
    "serve",
    "set_up_logs",
]

CONFIG_FILE = "dmq.toml"

# What every record of the standard library has; the rest came with `extra=`.
_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LogLevel(StrEnum):
    """What is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How it is logged."""

    TEXT = "text"
    JSON = "json"


DataFolder = Annotated[
    str | None, typer.Option("--data", metavar="DIR", help="Where the data goes.  [default: dmq-data]")
]
Host = Annotated[str | None, typer.Option("--host", metavar="H", help="Address to listen on.  [default: 127.0.0.1]")]
Port = Annotated[
    int | None, typer.Option("--port", metavar="N", help="Port for clients; 0 takes any free one.  [default: 9611]")
]
MetricsPort = Annotated[
    int | None,
    typer.Option("--metrics-port", metavar="N", help="Port for metrics and health; 0 takes any.  [default: 9690]"),
]
TelnetPort = Annotated[
    str | None,
    typer.Option(
        "--telnet-port", metavar="N", help="Port for a person with telnet; 0 takes any, none is off.  [default: 9612]"
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen on another address than loopback, without authentication.")
]
LogLevelOption = Annotated[
    LogLevel | None, typer.Option("--log-level", help="What is logged to stderr.  [default: info]")
]
Logs = Annotated[LogFormat | None, typer.Option("--log-format", help="How it is logged.  [default: text]")]


def resolve(config: Path | None, flags: Mapping[str, object], pairs: Sequence[str] | None = None) -> ResolvedSettings:
    """The settings in force, from `dmq.toml`, the environment and flags.

    Raises:
        InvalidSettings: one of them is unknown or bad.
    """
    from dmq.settings import Settings

    file = config or (Path(CONFIG_FILE) if Path(CONFIG_FILE).is_file() else None)
    given = {key: value for key, value in flags.items() if value is not None}
    return Settings.resolve(file, os.environ, {**parse_pairs(pairs), **given})


def serve(
    resolved: ResolvedSettings, *, insecure: bool, status_port: int | None, on_ready: Callable[[BrokerServer], None]
) -> None:
    """Run a broker until SIGTERM or Ctrl-C."""
    from dmq.broker.server import BrokerServer, run

    server = BrokerServer(resolved.settings, insecure=insecure, status_port=status_port)
    run(lambda: server.serve(on_ready, settings_file=resolved.file))


def log_settings(level: LogLevel | None, form: LogFormat | None) -> LogSettings:
    """How a command without settings of its own logs: by its flags, the environment and `dmq.toml`.

    Raises:
        InvalidSettings: one of them is unknown or bad.
    """
    return resolve(None, log_flags(level, form)).settings.log


def log_flags(level: LogLevel | None, form: LogFormat | None) -> dict[str, object]:
    """The flags, by the keys of the settings."""
    return {"log.level": level and level.value, "log.format": form and form.value}


def set_up_logs(settings: LogSettings) -> None:
    """Log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.format == "json" else TextLines())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _PLAIN}


class TextLines(logging.Formatter):
    """A line for people: time, level, event, then what belongs to it as name=value."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line = super().formatMessage(record)
        return line if isinstance(record.msg, EventLine) else str(EventLine(line, _extras(record)))


class JsonLines(logging.Formatter):
    """A line for programs: the event and each of its facts as fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = record.msg if isinstance(record.msg, EventLine) else EventLine(record.getMessage(), _extras(record))
        fields: dict[str, object] = {
            **line.facts,
            "at_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": line.event,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
