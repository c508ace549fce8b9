"""Settings come from four places, and a wrong one says where it stands."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import InvalidSettings
from dmq.settings import FIELDS, Settings, StoreSettings, format_size


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "dmq.toml"


def test_without_any_source_everything_is_default() -> None:
    resolved = Settings.resolve()
    assert resolved.settings == Settings()
    assert {resolved.source_of(key) for key in FIELDS} == {"default"}
    assert resolved.settings.store.segment_bytes == 1 << 30
    assert resolved.settings.store.retention_bytes is None


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(toml: Path) -> None:
    toml.write_text("[store]\nfragment = 10\nfiles_open_max = 20\nproducers_max = 30\n")
    environ = {"DMQ_STORE_FRAGMENT": "11", "DMQ_STORE_FILES_OPEN_MAX": "21", "PATH": "/bin"}
    resolved = Settings.resolve(toml, environ, {"store.fragment": 12, "store.thread_count": None})
    store = resolved.settings.store
    assert (store.fragment, store.files_open_max, store.producers_max, store.thread_count) == (12, 21, 30, 2)
    assert resolved.source_of("store.fragment") == "flag store.fragment"
    assert resolved.source_of("store.files_open_max") == "environment DMQ_STORE_FILES_OPEN_MAX"
    assert resolved.source_of("store.producers_max") == str(toml)
    assert resolved.source_of("store.thread_count") == "default"


def test_rows_show_every_setting_with_its_value_and_source() -> None:
    rows = list(Settings.resolve(environ={"DMQ_STORE_KEEP_UNCONSUMED": "true"}).rows())
    assert [key for key, _, _ in rows] == list(FIELDS)
    assert ("store.segment_bytes", "1GiB", "default") in rows
    assert ("store.retention_bytes", "none", "default") in rows
    assert ("store.keep_unconsumed", "true", "environment DMQ_STORE_KEEP_UNCONSUMED") in rows


def test_what_rows_show_can_be_read_back_from_the_environment() -> None:
    odd = StoreSettings(segment_bytes=(1 << 20) + 1, unit_bytes_max=1 << 20, body_bytes_max=5000, retention_hours=None)
    flags = {f"store.{name}": value for name, value in msgspec.structs.asdict(odd).items() if value is not None}
    resolved = Settings.resolve(flags={**flags, "store.retention_hours": "none"})
    environ = {FIELDS[key].env: value for key, value, _ in resolved.rows()}
    assert Settings.resolve(environ=environ).settings.store == odd


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("64KiB", 65536), ("64 kib", 65536), ("70000B", 70000), ("1GiB", 1 << 30), (" 2TiB ", 2 << 40)],
)
def test_a_size_may_carry_a_unit_wherever_it_is_written(text: str, size: int, toml: Path) -> None:
    toml.write_text(f'[store]\nread_cache_bytes = "{text}"\n')
    for resolved in (
        Settings.resolve(toml),
        Settings.resolve(environ={"DMQ_STORE_READ_CACHE_BYTES": text}),
        Settings.resolve(flags={"store.read_cache_bytes": text}),
    ):
        assert resolved.settings.store.read_cache_bytes == size


@given(st.integers(0, 1 << 50))
def test_a_size_survives_being_written_and_read(size: int) -> None:
    resolved = Settings.resolve(flags={"store.read_cache_bytes": format_size(size)})
    assert resolved.settings.store.read_cache_bytes == size


def test_none_lifts_a_limit_and_only_where_there_may_be_none(toml: Path) -> None:
    toml.write_text('[store]\nretention_hours = "none"\n')
    assert Settings.resolve(toml).settings.store.retention_hours is None
    with pytest.raises(InvalidSettings, match=r"store\.segment_bytes = 'none'"):
        Settings.resolve(environ={"DMQ_STORE_SEGMENT_BYTES": "none"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DMQ_STORE_SEGMENT_BYTES", "64MB"),
        ("DMQ_STORE_SEGMENT_BYTES", "1.5GiB"),
        ("DMQ_STORE_SEGMENT_BYTES", "-1"),
        ("DMQ_STORE_SEGMENT_BYTES", "65535"),
        ("DMQ_STORE_SEGMENT_BYTES", "9" * 5000),
        ("DMQ_STORE_SEGMENT_BYTES", ""),
        ("DMQ_STORE_FRAGMENT", "0"),
        ("DMQ_STORE_FRAGMENT", "256"),
        ("DMQ_STORE_FRAGMENT", "eight"),
        ("DMQ_STORE_FRAGMENT", "9" * 5000),
        ("DMQ_STORE_DISK_CLEAN", "1.1"),
        ("DMQ_STORE_DISK_CLEAN", "nan"),
        ("DMQ_STORE_FLUSH_SECONDS", "0"),
        ("DMQ_STORE_FLUSH_SECONDS", "inf"),
        ("DMQ_STORE_KEEP_UNCONSUMED", "maybe"),
        ("DMQ_STORE_FILES_OPEN_MAX", "15"),
    ],
)
def test_a_bad_value_is_named_with_its_source_and_what_is_expected(name: str, text: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        Settings.resolve(environ={name: text})
    field = next(field for field in FIELDS.values() if field.env == name)
    assert f"{field.key} = {text!r} (environment {name}) is not valid: expected " in str(caught.value)
    assert str(caught.value).endswith(field.expected())
    assert caught.value.detail["keys"] == [field.key]


@pytest.mark.parametrize("value", ['"8"', "8.5", "true", "[8]", "{a = 8}", "2020-01-01", "256"])
def test_a_value_of_the_wrong_type_in_the_file_is_refused(value: str, toml: Path) -> None:
    toml.write_text(f"[store]\nfragment = {value}\n")
    expected = re.escape(f"({toml}) is not valid: expected a whole number from 1 to 255")
    with pytest.raises(InvalidSettings, match=expected):
        Settings.resolve(toml)


def test_a_bad_value_is_an_error_even_where_it_is_overridden(toml: Path) -> None:
    toml.write_text("[store]\nfragment = 0\n")
    with pytest.raises(InvalidSettings, match=r"store\.fragment = 0"):
        Settings.resolve(toml, flags={"store.fragment": 8})


def test_an_unknown_key_in_the_file_gets_a_suggestion(toml: Path) -> None:
    toml.write_text("[store]\nsegment_byte = 70000\n")
    with pytest.raises(InvalidSettings, match=r"no setting store\.segment_byte .*did you mean store\.segment_bytes\?"):
        Settings.resolve(toml)


@pytest.mark.parametrize("text", ["[stor]\nfragment = 8\n", "store = 8\n", "fragment = 8\n"])
def test_anything_but_a_known_table_in_the_file_is_refused(text: str, toml: Path) -> None:
    toml.write_text(text)
    tables = r"\[broker\], \[log\], \[nameserver\], \[shard\], \[store\]"
    with pytest.raises(InvalidSettings, match=f"expected one of the tables {tables}"):
        Settings.resolve(toml)


def test_an_unknown_variable_gets_a_suggestion() -> None:
    with pytest.raises(InvalidSettings, match=r"no setting DMQ_STORE_FRAGMENTS .*did you mean DMQ_STORE_FRAGMENT"):
        Settings.resolve(environ={"DMQ_STORE_FRAGMENTS": "8"})
    with pytest.raises(InvalidSettings, match=r"no setting DMQ_X .*reference"):
        Settings.resolve(environ={"DMQ_X": "8"})


def test_an_unknown_flag_is_refused_even_if_it_was_not_given() -> None:
    with pytest.raises(InvalidSettings, match=r"no setting store\.colour \(flag\)"):
        Settings.resolve(flags={"store.colour": None})


def test_the_source_of_an_unknown_key_is_an_error() -> None:
    with pytest.raises(InvalidSettings, match=r"store\.colour"):
        Settings.resolve().source_of("store.colour")


def test_variables_that_are_no_settings_are_left_alone() -> None:
    environ = {
        "DMQ_TABLES": "./archive",
        "DMQ_URL": "dmq://127.0.0.1:9611",
        "DMQ_SERVICE_HOST": "10.0.0.1",
        "DMQ_SERVICE_PORT_BROKER": "9611",
        "DMQ_PORT": "tcp://10.0.0.1:9611",
        "DMQ_CONSOLE_PORT_9680_TCP_ADDR": "10.0.0.2",
        "DMQX": "1",
    }
    assert Settings.resolve(environ=environ).settings == Settings()


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "cannot be read"), (b"[store\n", "not valid TOML.*line 1"), (b"\xff\xfe", "not valid TOML")],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, expected: str, toml: Path) -> None:
    if content is not None:
        toml.write_bytes(content)
    with pytest.raises(InvalidSettings, match=f"{re.escape(str(toml))} .*{expected}"):
        Settings.resolve(toml)


@pytest.mark.parametrize(
    ("given_values", "lower", "upper"),
    [
        ({"disk_clean": 0.91}, "disk_clean", "disk_refuse"),
        ({"disk_clean": 0.86, "disk_force": 0.85}, "disk_clean", "disk_force"),
        ({"disk_force": 0.95}, "disk_force", "disk_refuse"),
        ({"thread_count": 9}, "thread_count", "fragment"),
        ({"segment_bytes": 64 << 10}, "unit_bytes_max", "segment_bytes"),
        ({"unit_bytes_max": (8 << 20) - 1}, "body_bytes_max", "unit_bytes_max"),
    ],
)
def test_two_values_that_contradict_each_other_are_both_named(
    given_values: dict[str, float], lower: str, upper: str
) -> None:
    with pytest.raises(InvalidSettings, match=f"store.{lower} = .* must be at most .*store.{upper} = "):
        StoreSettings(**given_values)  # type: ignore[arg-type]
    name = next(iter(given_values))
    with pytest.raises(InvalidSettings, match=rf"store.{name}: environment DMQ_STORE_{name.upper()}"):
        Settings.resolve(environ={FIELDS[f"store.{key}"].env: str(value) for key, value in given_values.items()})


def test_a_bad_value_cannot_be_set_in_code_either() -> None:
    with pytest.raises(InvalidSettings, match=r"store\.segment_bytes = 1 \(set in code\)"):
        StoreSettings(segment_bytes=1)
    with pytest.raises(InvalidSettings, match=r"store\.fragment = True"):
        StoreSettings(fragment=True)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().store.fragment = 9  # type: ignore[misc]


def test_every_setting_is_documented_as_it_is(root: Path) -> None:
    lines = (root / "docs" / "reference" / "settings.md").read_text().splitlines()
    documented = [line for line in lines if line.startswith("| `")]
    assert documented == [
        f"| `{f.key}` | `{f.show(f.default)}` | {f.meta.description} | {f.expected()} | `{f.env}` |"
        for f in FIELDS.values()
    ]
