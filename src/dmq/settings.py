"""One frozen, typed `Settings`, resolved once: defaults < `dmq.toml` < `DMQ_*` environment < flags.

What always holds: a `Settings` that exists is valid, however it was made; an unknown key or a bad value is an
`InvalidSettings` that names the key, where it came from and what is expected; nothing is read at import.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from dmq.errors import InvalidSettings

__all__ = [
    "FIELDS",
    "BrokerSettings",
    "Field",
    "LogSettings",
    "NameServerSettings",
    "ResolvedSettings",
    "Settings",
    "ShardSettings",
    "StoreSettings",
    "format_size",
    "parse_size",
]

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30

_UNITS = {"B": 1, "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*(B|KiB|MiB|GiB|TiB)?", re.IGNORECASE)
_SIZE_MAX = 1 << 50
_COUNT_MAX = 1 << 40

# Names that are ours but no settings: they steer a command or a test run.
_NOT_SETTINGS = frozenset({"DMQ_CONFIG", "DMQ_DATABASE", "DMQ_PURE", "DMQ_SEED", "DMQ_SOAK", "DMQ_TABLES", "DMQ_URL"})
# Kubernetes hands every pod these names for a service called dmq or dmq-something.
_SERVICE_LINK = re.compile(r"DMQ_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_PASSWORD = re.compile(r"(?<=://)([^:/@]*):[^/]*@")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")


def _size(low: int, meaning: str, high: int = _SIZE_MAX) -> Meta:
    return Meta(ge=low, le=high, description=meaning, extra={"size": True})


def _count(low: int, meaning: str, high: int = _COUNT_MAX) -> Meta:
    return Meta(ge=low, le=high, description=meaning)


def _time(meaning: str) -> Meta:
    return Meta(gt=0, description=meaning)


def _share(meaning: str) -> Meta:
    return Meta(gt=0, le=1, description=meaning)


def _text(meaning: str) -> Meta:
    return Meta(min_length=1, max_length=4096, description=meaning)


def _flag(meaning: str) -> Meta:
    return Meta(description=meaning)


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one message store keeps its data. The meaning of each field is part of its type."""

    segment_bytes: Annotated[int, _size(64 * KiB, "Size of one journal segment.")] = GiB
    unit_bytes_max: Annotated[int, _size(4 * KiB, "Largest unit that one write appends.", GiB)] = 8 * MiB
    unit_version: Annotated[int, _count(1, "Newest format of units to write: 2 has body blocks, 1 has none.", 2)] = 2
    body_bytes_max: Annotated[int, _size(1, "Largest message body, after compression.", GiB)] = 4 * MiB
    checkpoint_bytes: Annotated[int, _size(1, "Take a checkpoint after this much was written.")] = 64 * MiB
    checkpoint_records: Annotated[int, _count(1, "Take a checkpoint after this many records.")] = 1_000_000
    checkpoint_seconds: Annotated[float, _time("Take a checkpoint after this time, if anything was written.")] = 10.0
    flush_seconds: Annotated[float, _time("Flush what was only `stored` after this time.")] = 0.5
    retention_hours: Annotated[float, _time("Drop segments older than this; none keeps them.")] | None = 72.0
    retention_bytes: Annotated[int, _size(1, "Drop the oldest segments beyond this; none: no limit.")] | None = None
    disk_clean: Annotated[float, _share("Share of the disk in use at which all past the retention goes at once.")] = (
        0.75
    )
    disk_force: (
        Annotated[float, _share("Share of the disk in use at which even unconsumed segments go; none: never.")] | None
    ) = None
    disk_refuse: Annotated[float, _share("Share of the disk in use at which sends are refused.")] = 0.90
    ballast_bytes: Annotated[
        int, _size(0, "Space kept for settles, new groups and admin commands on a full disk; a 20th of it at most.")
    ] = 64 * MiB
    keep_unconsumed: Annotated[bool, _flag("Retention waits for every group that exists.")] = True
    keep_unarchived: Annotated[bool, _flag("Keep segments that the archive has not taken yet.")] = False
    fragment: Annotated[int, _count(1, "Fragments of the delay wheel.", 255)] = 8
    thread_count: Annotated[int, _count(1, "Threads that work on delay fragments.", 255)] = 2
    producers_max: Annotated[int, _count(1, "Producers whose sequence numbers are remembered.")] = 100_000
    producer_expiry_hours: Annotated[float, _time("Forget a producer that was silent for this time.")] = 24.0
    transactions_max: Annotated[int, _count(1, "Transactions that may be open at a time.")] = 100_000
    files_open_max: Annotated[int, _count(16, "Data files held open at a time.")] = 256
    scrub_hours: Annotated[
        float,
        Meta(ge=0, le=87_600, description="Time in which the whole journal is looked through for damage; 0: never."),
    ] = 168.0
    scrub_bytes_per_second: Annotated[int, _size(64 * KiB, "Bytes of it that are read in a second at most.", GiB)] = (
        16 * MiB
    )
    read_cache_bytes: Annotated[int, _size(0, "Memory for verified units that were read from disk.")] = 32 * MiB

    def __post_init__(self) -> None:
        for field in FIELDS.values():
            if field.section == "store":
                field.check(getattr(self, field.name), "set in code")
        # A record's head and attributes come on top of its body, and a unit never crosses a segment's end.
        self._at_most("body_bytes_max", "unit_bytes_max", half=True)
        self._at_most("unit_bytes_max", "segment_bytes")
        self._at_most("disk_clean", "disk_refuse")
        if self.disk_force is not None:
            self._at_most("disk_clean", "disk_force")
            self._at_most("disk_force", "disk_refuse")
        self._at_most("thread_count", "fragment")

    @property
    def takes_blocks(self) -> bool:
        """Whether bodies that were compressed together are written as they come."""
        return self.unit_version >= 2

    def _at_most(self, lower: str, upper: str, *, half: bool = False) -> None:
        small, large = FIELDS[f"store.{lower}"], FIELDS[f"store.{upper}"]
        a, b = getattr(self, lower), getattr(self, upper)
        if a > (b // 2 if half else b):
            raise InvalidSettings(
                f"{small.key} = {small.show(a)} must be at most {'half of ' if half else ''}"
                f"{large.key} = {large.show(b)}: lower the first or raise the second",
                keys=[small.key, large.key],
            )


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a broker serves its clients."""

    name: Annotated[str, _text("What the broker calls itself.")] = "dmq"
    host: Annotated[str, _text("Address it listens on.")] = "127.0.0.1"
    port: Annotated[int, _count(0, "Port for clients; 0 takes any free one.", 65535)] = 9611
    metrics_port: Annotated[int, _count(0, "Port for metrics and health; 0 takes any free one.", 65535)] = 9690
    metrics_series_max: Annotated[
        int, _count(0, "Topics, and groups, that /metrics shows one by one; /metrics/detail has all of them.", 10_000)
    ] = 100
    telnet_port: (
        Annotated[int, _count(0, "Port for a person with telnet; 0 takes any free one, none is off.", 65535)] | None
    ) = 9612
    data: Annotated[str, _text("Directory with the data.")] = "dmq-data"
    auto_create: Annotated[bool, _flag("Create a topic when it is first used.")] = False
    auto_create_queues: Annotated[int, _count(1, "Queues of a topic created that way.", 255)] = 4
    connections_max: Annotated[int, _count(1, "Connections at a time.")] = 20_000
    frame_bytes_max: Annotated[int, _size(64 * KiB, "Largest frame of a client.", 128 * MiB)] = 16 * MiB
    waiting_bytes_max: Annotated[int, _size(MiB, "Bytes waiting to be written before clients are told BUSY.")] = (
        128 * MiB
    )
    output_bytes_max: Annotated[int, _size(64 * KiB, "Output waiting for one client before it gets no more.")] = 4 * MiB
    topics_max: Annotated[int, _count(1, "Topics that may be created.", 10_000_000)] = 50_000
    groups_max: Annotated[int, _count(1, "Groups that may be kept; each broadcast member counts.", 10_000_000)] = (
        100_000
    )
    broadcast_expiry_hours: Annotated[float, _time("Forget a broadcast member that was away for this time.")] = 168.0
    pulls_waiting_max: Annotated[int, _count(1, "Pulls of one group that may wait.")] = 10_000
    heartbeat_seconds: Annotated[float, _time("Clients say something at least this often.")] = 30.0
    partial_seconds: Annotated[float, _time("A frame that was begun must be whole within this time.")] = 30.0
    partial_bytes_max: Annotated[int, _size(MiB, "What stalled, half-sent frames take together.")] = 256 * MiB
    hello_seconds: Annotated[float, _time("A connection must say hello within this time.")] = 10.0
    lease_seconds: Annotated[float, _time("Lease of a consumer that does not say.")] = 30.0
    retry_table: Annotated[
        str, _text("Seconds before each further attempt, as in `1,5,60`; `3^n` is 1, 3, 9 and so on.")
    ] = "3^n"
    grace_seconds: Annotated[float, _time("A consumer that lost its connection keeps its leases for this time.")] = 10.0
    offline_delay_ms: Annotated[int, _count(0, "Backlog begins this long after a subscription.", 3_600_000)] = 10
    dead_letters_url: Annotated[str, _text("Database of dead letters; none: SQLite in the data directory.")] | None = (
        None
    )
    dead_letters_per_second: Annotated[int, _count(1, "Dead letters resent, or taken from producers, in a second.")] = (
        1000
    )
    dead_letter_store_failures: Annotated[bool, _flag("Messages that cannot be stored become dead letters.")] = False
    prefetch_messages: Annotated[int, _count(1, "Prefetch of a consumer that does not say.", 1 << 20)] = 1000
    prefetch_bytes: Annotated[int, _size(64 * KiB, "The same in bytes.", GiB)] = 16 * MiB
    transaction_first_check_seconds: Annotated[
        float, _time("The first check of an open transaction comes after this time.")
    ] = 6.0
    transaction_check_seconds: Annotated[float, _time("It is asked about again at this interval.")] = 30.0
    transaction_checks_max: Annotated[
        int, _count(1, "After this many checks it is rolled back and becomes a dead letter.", 1_000_000)
    ] = 15
    straight: Annotated[
        bool, _flag("Plain messages sent one by one take a shorter way through the broker, with the same result.")
    ] = True
    drain_seconds: Annotated[float, _time("A stop waits this long for clients to finish.")] = 5.0


class ShardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a broker is a member of a shard; it is one if it has a registry and the shard's name."""

    registry_url: (
        Annotated[
            str, _text("Registry of the cluster, as dmq://host:9610 or zk://host:2181/dmq; none: a broker by itself.")
        ]
        | None
    ) = None
    name: Annotated[str, _text("Shard that the broker is a member of.")] | None = None
    address: Annotated[str, _text("Where clients reach it, as host:port; none: where it listens.")] | None = None
    replication_host: (
        Annotated[str, _text("Address it listens on for other members; none: that for clients.")] | None
    ) = None
    replication_port: Annotated[int, _count(0, "Port for other members; 0 takes any free one.", 65535)] = 9613
    replication_address: (
        Annotated[str, _text("Where other members reach it, as host:port; none: where it listens.")] | None
    ) = None
    zone: Annotated[str, _text("Zone it stands in; two members of one zone are reported.")] | None = None
    weight: Annotated[
        int, _count(0, "Share of the messages that may go to any shard, in percent, while it leads its own.", 10_000)
    ] = 100
    replicas: Annotated[int, _count(1, "Members of a shard that it creates.", 7)] = 3
    min_in_sync: Annotated[int, _count(1, "Members that must have a message, in a shard that it creates.", 7)] = 2
    promise_seconds: Annotated[float, _time("A follower stands for no election so long after it heard its leader.")] = (
        4.0
    )
    lag_seconds: Annotated[float, _time("A member that is behind for this time leaves the in-sync set.")] = 10.0
    uncommitted_bytes_max: Annotated[
        int, _size(MiB, "Bytes that not all in-sync members have before sends are refused.")
    ] = 64 * MiB

    def __post_init__(self) -> None:
        if (self.registry_url is None) != (self.name is None):
            given, missing = ("name", "registry_url") if self.registry_url is None else ("registry_url", "name")
            flags = {"name": "--shard", "registry_url": "--registry"}
            raise InvalidSettings(
                f"shard.{given} is set and shard.{missing} is not: a member of a shard needs both, so give "
                f"{flags[missing]} as well, or leave {flags[given]} out",
                keys=[f"shard.{given}", f"shard.{missing}"],
            )
        if self.min_in_sync > self.replicas:
            raise InvalidSettings(
                f"shard.min_in_sync = {self.min_in_sync} must be at most shard.replicas = {self.replicas}: lower the "
                "first or raise the second",
                keys=["shard.min_in_sync", "shard.replicas"],
            )


class NameServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How `dmq nameserver` runs. It needs a database."""

    database_url: (
        Annotated[str, _text("Database of the registry, or of its mirror, as postgresql://user@host/dmq.")] | None
    ) = None
    registry_url: (
        Annotated[str, _text("Registry that is elsewhere, as zk://host:2181/dmq: it is served, and mirrored.")] | None
    ) = None
    host: Annotated[str, _text("Address it listens on.")] = "127.0.0.1"
    port: Annotated[int, _count(0, "Port for brokers and clients; 0 takes any free one.", 65535)] = 9610
    metrics_port: (
        Annotated[int, _count(0, "Port for metrics and health; 0 takes any free one, none is off.", 65535)] | None
    ) = None
    session_seconds: Annotated[
        float, Meta(ge=1, le=60, description="How long a session lives without a sign of its broker.")
    ] = 6.0


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a command that goes on running logs to stderr."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], _flag("The least important lines that are logged.")
    ] = "info"
    format: Annotated[Literal["text", "json"], _flag("Lines for people, or a JSON object in each for programs.")] = (
        "text"
    )


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set, one section per layer."""

    store: StoreSettings = msgspec.field(default_factory=StoreSettings)
    broker: BrokerSettings = msgspec.field(default_factory=BrokerSettings)
    shard: ShardSettings = msgspec.field(default_factory=ShardSettings)
    nameserver: NameServerSettings = msgspec.field(default_factory=NameServerSettings)
    log: LogSettings = msgspec.field(default_factory=LogSettings)

    @classmethod
    def resolve(
        cls,
        file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, object] | None = None,
    ) -> ResolvedSettings:
        """Settle every value from its strongest source.

        Parameters:
            file: a TOML file with one table per section; None reads no file.
            environ: the environment, as in `os.environ`; names that do not begin with `DMQ_` are not looked at.
            flags: by key, as in `store.segment_bytes`; a None means that the flag was not given.

        Raises:
            InvalidSettings: keys are unknown, values are bad, two values contradict each other, or the file cannot be
                read. All unknown keys and bad values are told at once. A bad value is an error even where a stronger
                source overrides it.
        """
        values = {key: field.default for key, field in FIELDS.items()}
        sources = dict.fromkeys(FIELDS, "default")
        wrong: list[InvalidSettings] = []
        for found in (*_from_file(file), *_from_environ(environ or {}), *_from_flags(flags or {})):
            if isinstance(found, InvalidSettings):
                wrong.append(found)
                continue
            field, value, source = found
            values[field.key], sources[field.key] = value, source
        if wrong:
            raise _all_of(wrong)
        try:
            sections: dict[str, Any] = {
                section: struct(
                    **{field.name: values[key] for key, field in FIELDS.items() if field.section == section}
                )
                for section, struct in _SECTIONS.items()
            }
        except InvalidSettings as error:
            keys = error.detail.get("keys", [])
            whence = ", ".join(f"{key}: {sources[key]}" for key in keys)
            raise InvalidSettings(f"{error.message} ({whence})", keys=keys) from None
        return ResolvedSettings(
            cls(**sections),
            MappingProxyType(sources),
            None if file is None else os.fspath(file),
        )


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """Settings in force, and where each value came from."""

    settings: Settings
    sources: Mapping[str, str]
    file: str | None = None

    def source_of(self, key: str) -> str:
        """Where a value came from: `default`, the file, the environment variable or the flag."""
        return self.sources[_known(key, "asked for").key]

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Key, value as a person would write it, and source, in the order of the reference."""
        for key, field in FIELDS.items():
            yield key, field.show(getattr(getattr(self.settings, field.section), field.name)), self.sources[key]


@dataclass(frozen=True, slots=True)
class Field:
    """What is known about one setting."""

    section: str
    name: str
    type: Any
    meta: Meta
    is_optional: bool
    default: Any

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def env(self) -> str:
        return f"DMQ_{self.section}_{self.name}".upper()

    @property
    def is_size(self) -> bool:
        return bool((self.meta.extra or {}).get("size"))

    def show(self, value: object) -> str:
        """The value as one would write it in the environment."""
        if value is None:
            return "none"
        if isinstance(value, bool):
            return "true" if value else "false"
        if self.name.endswith("_url"):
            return _PASSWORD.sub(r"\1:***@", str(value))
        return format_size(value) if self.is_size and isinstance(value, int) else str(value)

    def expected(self) -> str:
        """What a good value looks like."""
        low, over, high = self.meta.ge, self.meta.gt, self.meta.le
        choices = get_args(get_args(self.type)[0])
        if choices:
            text = f"{', '.join(choices[:-1])} or {choices[-1]}"
        elif self.meta.min_length is not None:
            text = "some text"
        elif self.is_size:
            text = f"a size from {self.show(low)} to {self.show(high)}, in bytes or like 64MiB"
        elif high is not None and low is not None:
            text = f"a {'' if get_args(self.type)[0] is float else 'whole '}number from {low} to {high}"
        elif high is not None:
            text = f"a number over {over} up to {high}"
        else:
            text = "true or false" if over is None else f"a number over {over}"
        return f"{text}, or none" if self.is_optional else text

    def parse(self, raw: object, source: str, *, text: bool) -> Any:
        """Read a raw value; `text` means that everything from this source is written as text."""
        if isinstance(raw, str):
            if self.is_optional and raw.strip().lower() == "none":
                return None
            if self.is_size:
                size = parse_size(raw)
                return self.check(raw if size is None else size, source, raw)
        return self.check(raw, source, strict=not text)

    def check(self, value: object, source: str, raw: object = None, *, strict: bool = True) -> Any:
        """Return the value in its own type, if it has the type and lies in the range."""
        if value is None and self.is_optional:
            return None
        try:
            checked = msgspec.convert(value, self.type, strict=strict)
            if isinstance(checked, float) and not math.isfinite(checked):
                raise ValueError(value)
        except (msgspec.ValidationError, ValueError, OverflowError):
            shown = value if raw is None else raw
            raise InvalidSettings(
                f"{self.key} = {shown!r} ({source}) is not valid: expected {self.expected()}",
                keys=[self.key],
                source=source,
            ) from None
        return checked


def format_size(size: int) -> str:
    """The shortest exact way to write a size: 67108864 is 64MiB."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_size(text: str) -> int | None:
    """The bytes that a size means, in bytes or like 64MiB; None if it is not one."""
    found = _SIZE.fullmatch(text.strip())
    # Python refuses to read numbers of thousands of digits; no size has more than twenty.
    if found is None or len(found[1]) > 20:
        return None
    return int(found[1]) * _UNITS[(found[2] or "B").upper()]


def _fields_of(section: str, struct: type[msgspec.Struct]) -> Iterator[Field]:
    hints = get_type_hints(struct, include_extras=True)
    for info in msgspec.structs.fields(struct):
        hint = hints[info.name]
        is_optional = get_origin(hint) is not Annotated
        annotated = get_args(hint)[0] if is_optional else hint
        yield Field(
            section, info.name, annotated, annotated.__metadata__[0], is_optional=is_optional, default=info.default
        )


_SECTIONS: Mapping[str, type[msgspec.Struct]] = MappingProxyType(
    {
        "store": StoreSettings,
        "broker": BrokerSettings,
        "shard": ShardSettings,
        "nameserver": NameServerSettings,
        "log": LogSettings,
    }
)

# Every setting there is, by key.
FIELDS: Mapping[str, Field] = MappingProxyType(
    {field.key: field for section, struct in _SECTIONS.items() for field in _fields_of(section, struct)}
)


def _known(key: str, source: str, name: str | None = None) -> Field:
    """The field of a key; `name` is how the source spells it."""
    if key in FIELDS:
        return FIELDS[key]
    close = difflib.get_close_matches(key, FIELDS, n=1)
    hint = (
        f"did you mean {FIELDS[close[0]].env if name else close[0]}?" if close else "see the reference for all of them"
    )
    raise InvalidSettings(f"there is no setting {name or key} ({source}): {hint}", keys=[key], source=source)


# A value of a source, or why it is not one.
_Found: TypeAlias = "tuple[Field, Any, str] | InvalidSettings"


def _read(key: str, raw: object, source: str, *, text: bool, name: str | None = None) -> _Found:
    try:
        field = _known(key, source.partition(" ")[0] if name or source.startswith("flag ") else source, name)
        return field, field.parse(raw, source, text=text), source
    except InvalidSettings as error:
        return error


def _all_of(wrong: Sequence[InvalidSettings]) -> InvalidSettings:
    """One error that tells them all."""
    if len(wrong) == 1:
        return wrong[0]
    keys = [key for error in wrong for key in error.detail.get("keys", ())]
    told = "; ".join(error.message for error in wrong)
    return InvalidSettings(f"{len(wrong)} settings are wrong: {told}", keys=keys)


def _from_file(file: str | os.PathLike[str] | None) -> Iterator[_Found]:
    if file is None:
        return
    path = os.fspath(file)
    try:
        with open(path, "rb") as stream:
            tables = tomllib.load(stream)
    except OSError as error:
        raise InvalidSettings(f"the settings file {path} cannot be read: {error.strerror}", path=path) from error
    except ValueError as error:  # covers bad TOML and bad UTF-8
        raise InvalidSettings(f"the settings file {path} is not valid TOML: {error}", path=path) from error
    sections = sorted({field.section for field in FIELDS.values()})
    for section, table in tables.items():
        if section not in sections or not isinstance(table, dict):
            yield InvalidSettings(
                f"{section} ({path}) is not valid: expected one of the tables [{'], ['.join(sections)}]",
                keys=[section],
                source=path,
            )
            continue
        for name, raw in table.items():
            yield _read(f"{section}.{name}", raw, path, text=False)


def _from_environ(environ: Mapping[str, str]) -> Iterator[_Found]:
    by_env = {field.env: field.key for field in FIELDS.values()}
    for name in sorted(environ):
        if not name.startswith("DMQ_") or name in _NOT_SETTINGS or _SERVICE_LINK.fullmatch(name):
            continue
        if name.endswith("_PORT") and _SERVICE_URL.fullmatch(environ[name]):
            continue
        guess = name.removeprefix("DMQ_").lower().replace("_", ".", 1)
        yield _read(by_env.get(name, guess), environ[name], f"environment {name}", text=True, name=name)


def _from_flags(flags: Mapping[str, object]) -> Iterator[_Found]:
    for key, raw in flags.items():
        if raw is not None or key not in FIELDS:
            yield _read(key, raw, f"flag {key}", text=isinstance(raw, str))
