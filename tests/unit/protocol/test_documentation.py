"""docs/internals/protocol.md says what the code does, byte by byte."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dmq.model import TopicConfig
from dmq.protocol import CLASSES, SPECS, Command, FrameParser, Header, Way
from tests.unit.protocol.samples import all_headers, examples

WAYS = {
    Way.ASK: "client, request",
    Way.TELL: "client, request or one-way",
    Way.PUSH: "broker, one-way",
    Way.BOTH: "either, request or one-way",
}
# The structs of headers, by name; `Header` itself is the empty one.
STRUCTS = [cls for cls in all_headers() if cls is not Header]


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "docs" / "internals" / "protocol.md").read_text()


def shown(info: msgspec.inspect.Type) -> str:
    """A type as the documentation writes it."""
    match info:
        case msgspec.inspect.IntType():
            low, high = info.ge, info.le
            if low == 0:
                bits = {None: 64, (1 << 63) - 1: 63, (1 << 32) - 1: 32, (1 << 16) - 1: 16, 255: 8}.get(high)
                return f"u{bits}" if bits else f"0..{high}"
            return f"{low}..{high}"
        case msgspec.inspect.StrType() | msgspec.inspect.BytesType():
            name = "str" if isinstance(info, msgspec.inspect.StrType) else "bin"
            low, high = info.min_length or 0, info.max_length
            return name if high is None else f"{name}({low}..{high})"
        case msgspec.inspect.ListType():
            return f"[{shown(info.item_type)}]"
        case msgspec.inspect.TupleType():
            return f"({', '.join(map(shown, info.item_types))})"
        case msgspec.inspect.DictType():
            return f"{{{shown(info.key_type)}: {shown(info.value_type)}}}"
        case msgspec.inspect.UnionType():
            return " or ".join(sorted(map(shown, info.types)))
        case msgspec.inspect.StructType() | msgspec.inspect.EnumType():
            return info.cls.__name__
    return type(info).__name__.removesuffix("Type").lower()


def row(cls: type[Header]) -> str:
    """The line of the documentation for one struct: its fields in order, those in brackets may be left out.

    A default stands there if it is not nothing: 0, false, none or empty.
    """
    fields = []
    for field in msgspec.inspect.type_info(cls).fields:  # type: ignore[attr-defined]
        part = f"{field.name} {shown(field.type)}"
        default = getattr(field.default, "name", None) or field.default
        if field.required:
            fields.append(part)
        elif default in (0, "", b"", None, msgspec.NODEFAULT) or isinstance(default, msgspec.Struct):
            fields.append(f"[{part}]")
        else:
            fields.append(f"[{part} = {str(default).lower() if default is True else default}]")
    return f"| `{cls.__name__}` | {' · '.join(fields) or 'nothing'} |"


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda cls: cls.__name__)
def test_every_header_is_documented_field_by_field(cls: type[Header], text: str) -> None:
    assert row(cls) in text


def test_every_setting_of_a_topic_is_documented(text: str) -> None:
    table = text.split("A topic's settings:")[1].split("## Header structs")[0]
    assert re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.M))) == [*TopicConfig.__struct_fields__]


def test_every_choice_is_documented(text: str) -> None:
    def enums(cls: type[Header]) -> set[Any]:
        found = set()
        for field in msgspec.inspect.type_info(cls).fields:  # type: ignore[attr-defined]
            if isinstance(field.type, msgspec.inspect.EnumType):
                found.add(field.type.cls)
        return found

    for enum in set().union(*map(enums, STRUCTS)):
        line = " · ".join(f"{int(member)} {member.name}" for member in enum)
        assert f"| `{enum.__name__}` | {line} |" in text


@pytest.mark.parametrize("command", SPECS, ids=lambda command: command.name)
def test_every_command_is_documented(command: Command, text: str) -> None:
    spec = SPECS[command]

    def named(cls: type[Header] | None) -> str:
        return "reserved" if cls is None else "empty" if cls is Header else f"`{cls.__name__}`"

    answer = "none" if spec.way is Way.PUSH else named(spec.response)
    start = f"| `0x{int(command):04x}` | `{command.name}` | {WAYS[spec.way]} | {named(spec.request)} | {answer} | "
    assert start in text


def test_every_status_is_documented(text: str) -> None:
    for status, cls in CLASSES.items():
        retriable = "yes" if cls.retriable else "no"
        line = rf"^\| `0x{int(status):04x}` \| `{status.name}` \| `{cls.__name__}` \| {retriable} \| \S"
        assert re.search(line, text, re.MULTILINE), status.name
    assert len(re.findall(r"^\| `0x0[1-4][0-9a-f]{2}` \| `[A-Z_]+` \| `\w+` \| (?:yes|no) \|", text, re.M)) == len(
        CLASSES
    )


def shown_examples(text: str) -> dict[str, bytes]:
    """The worked examples: hex, then two spaces, then what it means."""
    blocks = re.findall(r"<!-- example: ([\w-]+) -->\n```text\n(.*?)```", text, re.DOTALL)
    return {name: bytes.fromhex("".join(line.split("  ")[0] for line in block.splitlines())) for name, block in blocks}


def test_every_worked_example_is_what_we_send(text: str) -> None:
    found = shown_examples(text)
    assert set(found) == set(examples())
    for name, frame in examples().items():
        assert found[name].hex(" ") == frame.hex(" "), name
        assert len(FrameParser().feed(found[name])) == 1
