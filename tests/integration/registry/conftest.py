"""The implementations of the registry's contract, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.registry.registries import MemoryRegistries, Registries


@pytest.fixture(params=["memory"])
def registries(request: pytest.FixtureRequest) -> Callable[[], Registries]:
    """Makes a registry; called on the event loop of the test."""
    return MemoryRegistries
