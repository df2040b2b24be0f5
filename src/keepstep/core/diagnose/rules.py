"""All rules, and which of them may match a line."""

from __future__ import annotations

import functools

from keepstep.core.diagnose.rule import Rule
from keepstep.core.diagnose.rules_context import CONTEXT
from keepstep.core.diagnose.rules_data import DATA
from keepstep.core.diagnose.rules_gpu import GPU
from keepstep.core.diagnose.rules_kernel import KERNEL
from keepstep.core.diagnose.rules_network import NETWORK
from keepstep.core.diagnose.rules_python import PYTHON
from keepstep.core.diagnose.rules_scheduler import SCHEDULER
from keepstep.core.diagnose.rules_slow import SLOW
from keepstep.core.diagnose.rules_storage import STORAGE
from keepstep.core.diagnose.scan import shape

RULES: tuple[Rule, ...] = (*GPU, *KERNEL, *NETWORK, *SLOW, *STORAGE, *DATA, *SCHEDULER, *PYTHON, *CONTEXT)
BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}
GENERIC = "python_exception"
"""Yields to every other rule that matches the same line."""

_FAULTS = tuple(rule for rule in RULES if rule.role != "context")
SCANNED: tuple[str, ...] = (*{word for rule in _FAULTS for word in rule.words}, "xid", 'file "', "traceback")
"""Lines with one of these words are read; context alone does not make a line worth reading."""
_NEEDLES = tuple((rule, tuple(shape(word.encode()).strip() for word in rule.words)) for rule in RULES)


SHORT_SHAPE = 300
"""Bytes of a shape whose rules are remembered: the same lines come again from rank to rank, log to log."""


def candidates(kind: bytes) -> tuple[Rule, ...]:
    """Rules that a line of this shape may match."""
    return _remembered(kind) if len(kind) <= SHORT_SHAPE else _candidates(kind)


def _candidates(kind: bytes) -> tuple[Rule, ...]:
    return tuple(rule for rule, needles in _NEEDLES if any(needle in kind for needle in needles))


_remembered = functools.lru_cache(maxsize=8_000)(_candidates)
