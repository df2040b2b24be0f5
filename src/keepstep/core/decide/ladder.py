"""The restart ladder: the lowest rung that can work, with the reason for it and why the others were passed over.

    in_process > same_node > replace_node > restart_job > requeue | stop

A rung is taken when nothing speaks against it. What speaks against it is a sentence, and the sentences are kept: they
are the alternatives an operator wants to see. Every rung has a budget, so that the climb ends.
"""

from __future__ import annotations

from msgspec import Struct

from keepstep.model.exits import BAD_CONFIG, NO_PROGRESS, REQUEUE
from keepstep.model.ids import NodeId, Rank
from keepstep.model.records import Category, Rung
from keepstep.model.topology import fold_ranks

LADDER: tuple[Rung, ...] = ("in_process", "same_node", "replace_node", "restart_job", "requeue", "stop")


def above(rung: Rung) -> Rung:
    """The next higher rung; ``stop`` is its own."""
    return LADDER[min(LADDER.index(rung) + 1, len(LADDER) - 1)]


class Situation(Struct, frozen=True, kw_only=True):
    """All that the ladder looks at.

    Attributes:
        settled: every rank has trained in this generation of processes, so there is a state to return to in process.
        ending: some rank is past its training loop; its process cannot be sent back into it.
        floor: no rung below this one (the rungs below have been tried in this incident, or cannot work).
        attempts: epochs opened for this incident; none has led to a new step.
        in_process_budget: attempts that a fault of this class has; ``budget_name`` is its setting.
        again: that the same stack came back at the same step, in words: then it is not the machine.
        vacant: ranks that need a process. Empty: everybody lives, only the communicators are broken.
        parked: a warm standby is parked for every vacant seat of a living node.
        lost: nodes of the roster that are gone.
        evict: living nodes that are to go and may go: their proposals are approved, and there is a spare for each.
        kept: why a living node that is to blame stays nevertheless; empty when none is to blame.
        broken: the words of the node that is to blame prove that it is broken.
        spares: nodes that could take a lost or faulty node's ranks.
        smaller: the job may go on with the nodes it has left (it has no state in memory, and enough nodes).
        no_capacity: the wait for a node is over.
        repeated: the same exception at the same step came back.
        worker_code: what the culprit's exit means as an exit code of the job.
    """

    level: int
    settled: bool
    ending: bool
    category: Category
    floor: Rung
    attempts: int
    in_process_budget: int
    budget_name: str = "in_process_budget"
    again: str = ""
    vacant: tuple[Rank, ...]
    parked: bool
    lost: tuple[NodeId, ...]
    evict: tuple[NodeId, ...]
    kept: str
    broken: bool = False
    spares: int
    nodes_replaced: int
    replace_node_budget: int
    smaller: bool
    no_capacity: bool
    restarts: int
    max_restarts: int
    user_faults: int
    user_retries: int
    repeated: bool
    signature: str
    worker_code: int
    culprit: str


class Plan(Struct, frozen=True, kw_only=True):
    """What to do. ``wait``: the rung is right but needs a node first. ``code``: of the job, when this is its end."""

    rung: Rung
    reason: str
    rejected: tuple[str, ...]
    cost_if_wrong: str
    wait: bool = False
    code: int = 0
    moves: tuple[NodeId, ...] = ()
    """Nodes whose ranks go to another node."""


def choose(s: Situation) -> Plan:
    """The lowest rung against which nothing speaks."""
    against: dict[Rung, str] = {
        "in_process": _against_in_process(s),
        "same_node": _against_same_node(s),
        "replace_node": _against_replace_node(s),
        "restart_job": _against_restart(s),
        "requeue": _against_requeue(s),
    }
    rejected: list[str] = []
    for rung in LADDER[:-1]:
        why = against[rung]
        if not why and LADDER.index(rung) < LADDER.index(s.floor):
            why = "has been tried in this incident" if s.attempts else "cannot help against this fault"
        if not why:
            return _plan(s, rung, tuple(rejected))
        rejected.append(f"{rung}: {why}")
    return _plan(s, "stop", tuple(rejected))


def _user_verdict(s: Situation) -> str:
    """Why retrying user code is pointless; empty when a retry is worth it."""
    if s.level and s.again and not s.lost:
        return s.again
    if s.category not in ("user_code", "data"):
        return ""
    if s.level and s.worker_code == BAD_CONFIG:
        return f"the processes refused to start ({s.signature.split('@')[0]}), and would again"
    if s.level and s.repeated:
        return f"{s.signature} came back at the same step: it is the code or the data"
    if s.level and s.user_faults > s.user_retries:
        return f"the user's code failed {s.user_faults} times without a new step (user_retries {s.user_retries})"
    return ""


def _against_live(s: Situation) -> str:
    """What speaks against every rung that keeps the survivors' processes."""
    if verdict := _user_verdict(s):
        return verdict
    if not s.level:
        return "the script does not call keepstep.init, so its processes cannot take part in a recovery"
    if s.ending:
        return "some ranks are past their training loop"
    if not s.settled:
        return "not every rank had reached its first step, there is no state to return to"
    return ""


def _against_in_place(s: Situation) -> str:
    if why := _against_live(s):
        return why
    if s.lost:
        return f"node {', '.join(s.lost)} is gone"
    if s.attempts >= s.in_process_budget:
        return f"{s.attempts} attempts in process led to no new step ({s.budget_name} {s.in_process_budget})"
    if s.evict:
        return f"node {', '.join(s.evict)} is to go, and a spare node is there"
    return ""


def _against_in_process(s: Situation) -> str:
    if why := _against_in_place(s):
        return why
    if not s.parked:
        return f"no standby is parked where rank {fold_ranks(s.vacant)} ran"
    return ""


def _against_same_node(s: Situation) -> str:
    if why := _against_in_place(s):
        return why
    return "" if s.vacant else "every process lives, there is none to replace"


def _against_replace_node(s: Situation) -> str:
    if why := _against_live(s):
        return why
    if s.category == "user_code" and not s.lost:
        return "the exception is the code's, another node would raise it too"
    if s.category == "data" and not s.lost:
        return "the data is at fault, another node would read the same"
    if s.nodes_replaced + len(s.lost) > s.replace_node_budget:
        return f"replace_node_budget {s.replace_node_budget} is used up"
    if s.lost:
        return "no node came in time" if s.no_capacity else ""
    return "" if s.evict else s.kept or "no node is to blame"


def _against_restart(s: Situation) -> str:
    if verdict := _user_verdict(s):
        return verdict
    if s.restarts >= s.max_restarts:
        return f"{s.restarts} of {s.max_restarts} restarts (max_restarts) are used up"
    if s.lost and not s.smaller:
        if s.nodes_replaced + len(s.lost) > s.replace_node_budget:
            return f"replace_node_budget {s.replace_node_budget} is used up"
        if s.no_capacity:
            return "no node came in time"
    return ""


def _against_requeue(s: Situation) -> str:
    if verdict := _user_verdict(s):
        return verdict
    return "" if s.lost or s.broken else "all nodes are there, another allocation would not help"


_COST: dict[Rung, str] = {
    "in_process": "one more rebuild of the communicators, a few seconds",
    "same_node": "one more rebuild and a cold start of the process",
    "replace_node": "a healthy node stands idle",
    "restart_job": "the start-up time of the whole job",
    "requeue": "the time in the queue",
    "stop": "a run that one more try might have saved",
}


def _plan(s: Situation, rung: Rung, rejected: tuple[str, ...]) -> Plan:
    moves: tuple[NodeId, ...] = ()
    wait, code = False, 0
    ranks = f"rank {fold_ranks(s.vacant)}"
    match rung:
        case "in_process":
            what = f"Give {ranks} to a parked standby" if s.vacant else "Rebuild the communicators in place"
        case "same_node":
            what = f"Start {ranks} anew on the same node"
        case "replace_node":
            moves = (*s.lost, *s.evict)
            wait = s.spares < len(s.lost)
            what = f"Move the ranks of node {', '.join(moves)} to another node"
        case "restart_job":
            moves = (*s.lost, *s.evict)
            wait = not s.smaller and s.spares < len(s.lost)
            what = f"Restart all processes (restart {s.restarts + 1} of {s.max_restarts})"
        case "requeue":
            code = REQUEUE
            what = "Ask for another allocation"
        case "stop":
            code, what = _stop(s)
    tail = " No spare node is connected; waiting for one." if wait else ""
    return Plan(
        rung=rung,
        reason=f"{what}: {s.culprit}.{tail}",
        rejected=rejected,
        cost_if_wrong=_COST[rung],
        wait=wait,
        code=code,
        moves=moves,
    )


def _stop(s: Situation) -> tuple[int, str]:
    if s.category in ("user_code", "data") or s.again:
        return s.worker_code, f"Stop, {_user_verdict(s) or 'the code failed in every attempt'}"
    if s.attempts:
        return NO_PROGRESS, "Stop, the fault came back in every attempt"
    return s.worker_code, "Stop, no attempt is allowed"
