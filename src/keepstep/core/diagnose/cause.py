"""Cause: one candidate for what went wrong, and the few verdicts that second thoughts may pass on it."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from keepstep.core.diagnose import places as where
from keepstep.core.diagnose.observe import Finding, Log
from keepstep.core.diagnose.result import Action, Category

SHARED_NODES = 3
"""Nodes with the same storage fault, from which on the storage is to blame and not the nodes."""


class Cause(Struct, frozen=True, kw_only=True):
    """A candidate: all findings of one root cause, and what is thought of them."""

    id: str
    category: Category
    action: Action
    transient: bool | None
    says: str
    weight: float
    findings: tuple[Finding, ...]
    why: str = ""

    @property
    def nodes(self) -> set[str]:
        return {one.node for one in self.findings if one.node}


def machine(cause: Cause, weight: float, why: str, action: Action = "replace_node") -> Cause:
    return replace(cause, category="infrastructure", action=action, transient=False, weight=weight, why=why)


def users(cause: Cause, weight: float, why: str) -> Cause:
    return replace(cause, category="user_code", action="stop_and_notify_user", transient=False, weight=weight, why=why)


def passing(cause: Cause, id: str, action: Action, weight: float, why: str) -> Cause:
    return replace(cause, id=id, category="transient", action=action, transient=True, weight=weight, why=why)


def spread(cause: Cause, log: Log) -> bool:
    """Whether the fault is the same on many machines."""
    ranked = {one.rank for one in cause.findings if one.rank is not None}
    everywhere = log.has("everywhere") and not log.has("only_here")
    wide = any(where.is_node_range(one.text) for one in cause.findings)
    return everywhere or wide or len(cause.nodes) >= SHARED_NODES or len(ranked) > 8 + len(log.places.ranks) // 2


def died(log: Log) -> bool:
    return any(found[0].rule.role in ("cascade", "teardown") for found in log.findings.values())
