"""The error tree is one tree, public and documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dmq
from dmq import errors
from dmq.errors import DMQError

CLASSES: list[type[DMQError]] = [getattr(errors, name) for name in errors.__all__]


def all_below(cls: type[DMQError]) -> set[type[DMQError]]:
    return {cls}.union(*(all_below(sub) for sub in cls.__subclasses__()))


def test_every_error_class_is_exported() -> None:
    # What a layer raises and catches itself, as storage.frames.DerivedDamaged, never reaches a user.
    assert {cls for cls in all_below(DMQError) if cls.__module__ == "dmq.errors"} == set(CLASSES)
    assert set(errors.__all__) <= set(dmq.__all__)
    assert all(getattr(dmq, cls.__name__) is cls for cls in CLASSES)


def test_every_code_belongs_to_one_class() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[A-Z][A-Z_]*", code) for code in codes)


def test_an_error_shows_its_message_and_keeps_its_detail() -> None:
    error = errors.OffsetGone("offset 3 is gone: read from 7 on", first=7, next=9)
    assert str(error) == "offset 3 is gone: read from 7 on"
    assert error.detail == {"first": 7, "next": 9}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_documented(cls: type[DMQError], root: Path) -> None:
    reference = (root / "docs" / "reference" / "errors.md").read_text()
    assert cls.__base__ is not None
    retriable = "yes" if cls.retriable else "no"
    row = rf"^\| `{cls.code}` \| `{cls.__name__}` \| `{cls.__base__.__name__}` \| {retriable} \| \S"
    assert re.search(row, reference, re.MULTILINE)
