"""Entries and operations as frames have them, and back."""

from __future__ import annotations

from collections.abc import Iterable

from dmq.protocol.cluster.registry import RegistryEntry, RegistryOperation, Step
from dmq.registry.registry import Check, Create, Delete, Entry, Operation, Put

__all__ = ["entry_header", "entry_of", "operation_headers", "operations_of"]


def entry_header(entry: Entry) -> RegistryEntry:
    return RegistryEntry(entry.path, entry.value, entry.version, entry.session)


def entry_of(header: RegistryEntry) -> Entry:
    return Entry(header.path, header.value, header.version, header.session)


def operation_headers(operations: Iterable[Operation]) -> list[RegistryOperation]:
    return [_header(operation) for operation in operations]


def _header(operation: Operation) -> RegistryOperation:
    match operation:
        case Check(path, version):
            return RegistryOperation(Step.CHECK, path, version=version)
        case Create(path, value, ephemeral):
            return RegistryOperation(Step.CREATE_EPHEMERAL if ephemeral else Step.CREATE, path, value)
        case Put(path, value, version):
            return RegistryOperation(Step.PUT, path, value, version)
        case Delete(path, version):
            return RegistryOperation(Step.DELETE, path, version=version)


def operations_of(headers: Iterable[RegistryOperation]) -> list[Operation]:
    return [_operation(header) for header in headers]


def _operation(header: RegistryOperation) -> Operation:
    match header.step:
        case Step.CHECK:
            return Check(header.path, header.version)
        case Step.CREATE | Step.CREATE_EPHEMERAL:
            return Create(header.path, header.value, header.step == Step.CREATE_EPHEMERAL)
        case Step.PUT:
            return Put(header.path, header.value, header.version)
        case Step.DELETE:
            return Delete(header.path, header.version)
