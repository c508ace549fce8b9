"""Pytest fixtures that come with DMQ: `dmq_broker`, a fresh broker in memory for each test.

Pytest loads this module at its start in every project that has DMQ installed, so it imports nothing until a test asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dmq.testing.broker import TestBroker

__all__ = ["dmq_broker"]


@pytest.fixture
def dmq_broker() -> Iterator[TestBroker]:
    """A running broker: `client = dmq_broker.connect()`."""
    from dmq.testing.broker import TestBroker

    with TestBroker() as broker:
        yield broker
