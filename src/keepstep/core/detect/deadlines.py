"""Names of all deadlines. Each job has at most one of a name; setting it again replaces it."""

from __future__ import annotations

JOIN = "join"
"""``spec.join_timeout_s`` from submission: below ``min_nodes`` by then, the job fails."""
LAST_CALL = "last_call"
"""``spec.last_call_s`` from the moment ``min_nodes`` are there: start without the others."""
STORE = "store"
"""``rebuild_s``: an epoch waits for an unused rendezvous store."""
REBUILD = "rebuild"
"""``rebuild_s`` (``first_start_s`` when every process is new): every rank has resumed by then."""
VERIFY = "verify"
"""``verify_s``: every rank has done one new step by then."""
SETTLE = "settle"
"""``settle_s``: without the SDK, processes that lived so long count as recovered."""
LOCATE = "locate"
"""``locate_s``: stall reports are in."""
STACKS = "stacks"
"""``stacks_s``: where the processes of ranks that do not move stand has been shown by then."""
EXPLAIN = "explain"
"""``explain_s``: broken collectives and exits by consequence have found their culprit by then, or never."""
PATIENCE = "patience"
"""``stall_patience_s``: some ranks stall, others have a reason to be busy; even that ends."""
CAPACITY = "capacity"
"""``capacity_s``: a node has come by then, or the job asks to be requeued."""
PAUSE = "pause"
"""The budget's pause between two attempts is over: the plan may be carried out."""
LEAVE = "leave"
"""``leave_s`` since a node of the roster left by will: no other has followed, so only that node was to end."""
ADOPT = "adopt"
"""``lease_s``: the report of a deputy whose epoch a node has already accepted is here."""

_RECONNECT = "reconnect:"
_RECONCILE = "reconcile:"
_PROPOSAL = "proposal:"
_SOAK = "soak:"


def reconnect(node: str) -> str:
    """``reconnect_s`` from a broken connection: after it, broken collectives elsewhere prove the node gone."""
    return _RECONNECT + node


def reconcile(node: str) -> str:
    """``explain_s`` from an agent's return: exits of processes it no longer has are reported by then."""
    return _RECONCILE + node


def reconcile_node(name: str) -> str | None:
    return name[len(_RECONCILE) :] if name.startswith(_RECONCILE) else None


def reconnect_node(name: str) -> str | None:
    return name[len(_RECONNECT) :] if name.startswith(_RECONNECT) else None


def proposal(name: str) -> str:
    """``approve_s``: a person has decided by then, or a spare node has come for what is approved."""
    return _PROPOSAL + name


def proposal_named(name: str) -> str | None:
    return name[len(_PROPOSAL) :] if name.startswith(_PROPOSAL) else None


def soak(name: str) -> str:
    """``soak_s`` and ``soak_patience_s`` more: the suspects of an investigation have examined themselves by then."""
    return _SOAK + name


def soak_named(name: str) -> str | None:
    return name[len(_SOAK) :] if name.startswith(_SOAK) else None
