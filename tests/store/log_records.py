"""Records for log tests: small, distinct, and comparable."""

from __future__ import annotations

from keepstep.model.ids import JobId, Nanos
from keepstep.model.records import AnyRecord, DeadlineSet


def record(number: int, *, padding: int = 0) -> AnyRecord:
    return DeadlineSet(job=JobId("j"), at=Nanos(number), name=f"n{number}" + "x" * padding, due=Nanos(number))


def batch(first: int, count: int, *, padding: int = 0) -> list[AnyRecord]:
    return [record(number, padding=padding) for number in range(first, first + count)]
