"""Silent data corruption: what the guard saw becomes an investigation, and each step of it an order or a verdict."""

from __future__ import annotations

from keepstep.core.draft import Draft
from keepstep.model.facts import GuardNoted, SelfTestDone


def guard_noted(draft: Draft, fact: GuardNoted) -> None:
    """The guard told of numbers that cannot be right."""


def self_test_done(draft: Draft, fact: SelfTestDone) -> None:
    """A suspect has examined itself."""
