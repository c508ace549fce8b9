"""Registries beside a simple model: whatever the order of events, and whatever answers are lost."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from dmq.registry.memory import Fate, MemoryClient, MemoryRegistry
from dmq.registry.registry import Registry
from dmq.testing.clock import FakeClock
from tests.integration.registry.registry_model import RegistryMachine

T = TypeVar("T")


class MemoryMachine(RegistryMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry = MemoryRegistry(FakeClock(), seed=7)

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            work.send(None)
        except StopIteration as end:
            value: T = end.value
            return value
        raise AssertionError("memory has nothing to wait for")

    def connect(self) -> Registry:
        return self.registry.connect(beats=False)

    def expire_session(self, client: Registry) -> None:
        self.registry.expire(client.session)

    def decide(self, client: Registry, fate: Fate) -> None:
        assert isinstance(client, MemoryClient)
        # Some late writes come by themselves, between other events.
        if self.registry.random.random() < 0.2:
            self.registry.land_late()
        client.fates.append(fate)


def machine_settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def test_a_registry_in_memory_does_what_the_model_does() -> None:
    run_state_machine_as_test(MemoryMachine, settings=machine_settings(60, 30))


@pytest.mark.soak
def test_a_registry_in_memory_does_what_the_model_does_for_long() -> None:
    run_state_machine_as_test(MemoryMachine, settings=machine_settings(3000, 60))
