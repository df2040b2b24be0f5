"""What ``benchmarks.localise`` counts as right, and as harm done to the innocent."""

from __future__ import annotations

import random
from typing import Any

import pytest
from benchmarks.localise import victims
from benchmarks.localise_cases import CASES, NODES, RANKS
from benchmarks.localise_score import Truth, innocent, right, stories, summary, verdict

from keepstep.model.actions import KillProcess
from keepstep.model.facts import WorkerExited
from keepstep.model.ids import ActionId, Epoch, IncidentId, JobId, Nanos, NodeId, Rank, SlotId
from keepstep.model.records import (
    IncidentOpened,
    NodeMoved,
    Observed,
    Ordered,
    Record,
    StragglerNoted,
    SuspectNamed,
)
from keepstep.model.topology import Member, Roster

JOB, INCIDENT = JobId("j"), IncidentId("j-i1")
SEATS = {rank: f"node-{rank // 2}" for rank in range(8)}
S = 10**9


def named(at: int, ranks: tuple[int, ...] = (), node: str | None = None, **more: Any) -> SuspectNamed:
    told: dict[str, Any] = {
        "category": "infrastructure",
        "probability": 0.9,
        "reason": "because",
        "evidence": (),
    } | more
    return SuspectNamed(
        job=JOB,
        at=Nanos(at),
        incident=INCIDENT,
        node=None if node is None else NodeId(node),
        ranks=tuple(map(Rank, ranks)),
        **told,
    )


def opened(at: int) -> IncidentOpened:
    return IncidentOpened(job=JOB, at=Nanos(at), incident=INCIDENT, onset=Nanos(at), title="no progress")


def roster() -> Roster:
    members = tuple(
        Member(rank=Rank(r), node=NodeId(n), slot=SlotId(f"s{r}"), local_rank=r % 2) for r, n in SEATS.items()
    )
    return Roster(
        job=JOB,
        epoch=Epoch(1),
        origin="controller",
        mode="fresh",
        world_size=8,
        members=members,
        places=(),
        store_host="h",
        store_port=1,
    )


def killed(at: int, rank: int) -> Ordered:
    kill = KillProcess(
        id=ActionId(f"k{rank}"),
        job=JOB,
        epoch=Epoch(1),
        node=NodeId(SEATS[rank]),
        slot=SlotId(f"s{rank}"),
        why="named",
    )
    return Ordered(job=JOB, at=Nanos(at), action=kill)


def test_the_first_verdict_behind_the_onset_is_timed_from_when_no_progress_was_declared() -> None:
    """An older incident's suspect does not count, nor does a second thought."""
    log: list[Record] = [named(1 * S, (1,)), opened(5 * S), named(6 * S, (3,)), named(9 * S, (4,))]
    said = verdict(stories(log, 2 * S), SEATS)
    assert said is not None
    assert (said.declared, said.named, said.ranks, said.nodes) == (5 * S, 6 * S, (3,), ("node-1",))
    assert verdict(stories(log, 10 * S), SEATS) is None


@pytest.mark.parametrize(
    ("truth", "record", "is_right"),
    [
        (Truth(ranks=(3,)), named(1, (3,)), True),
        (Truth(ranks=(3,)), named(1, (2,)), False),
        (Truth(ranks=(3,)), named(1, (2, 3)), False),
        (Truth(ranks=(3,)), named(1, (), "node-1"), False),
        (Truth(ranks=(3,)), named(1, ()), False),
        (Truth(nodes=("node-1", "node-2")), named(1, (2, 3, 4, 5)), True),
        (Truth(nodes=("node-1", "node-2")), named(1, (2,)), False),
        (Truth(nodes=("node-1", "node-2")), named(1, reason="nodes node-1 and node-2 are apart"), True),
        (Truth(nodes=("node-1", "node-2")), named(1, reason="node-1, node-2 and node-3 are apart"), False),
        (Truth(nodes=("node-1", "node-2")), named(1, reason="node-1 and node-2", probability=0.0), False),
        (Truth(), named(1), True),
        (Truth(), named(1, (0,)), False),
        (Truth(), named(1, (), "node-0"), False),
    ],
)
def test_right_is_the_whole_truth_and_nothing_else(truth: Truth, record: SuspectNamed, is_right: bool) -> None:
    """A neighbour, one too many, the node instead of the rank: all of them are wrong."""
    assert right(truth, verdict([opened(0), record], SEATS)) is is_right


def test_nothing_said_is_wrong_even_where_nobody_is_guilty() -> None:
    """To be silent about a job that stands still is no answer."""
    assert not right(Truth(), None)


def test_victims_in_the_same_decision_are_not_suspects() -> None:
    """What died of another's fault is named beside the culprit, as a consequence."""
    log = [opened(0), named(1, (3,)), named(1, (5,), category="transient", probability=0.3)]
    said = verdict(log, SEATS)
    assert said is not None
    assert said.ranks == (3,)


def test_a_straggler_is_a_verdict_unless_it_is_over() -> None:
    """Its end is told with the same record."""
    note = StragglerNoted(
        job=JOB,
        at=Nanos(7),
        cause="device",
        ranks=(Rank(3),),
        nodes=(NodeId("node-1"),),
        slowdown=1.5,
        probability=0.9,
        why="slow",
    )
    over = StragglerNoted(
        job=JOB, at=Nanos(3), cause="gc", ranks=(), nodes=(), slowdown=1.0, probability=0.9, why="", over=True
    )
    said = verdict([over, note], SEATS)
    assert said is not None
    assert (said.ranks, said.named - said.declared) == ((3,), 0)


def test_harm_is_a_kill_an_eviction_or_a_process_that_was_exchanged() -> None:
    """The guilty may be killed; who died by itself was not; a node may go where the fault may be the machine's."""
    ended = WorkerExited(
        job=JOB,
        at=Nanos(1),
        node=NodeId("node-3"),
        seq=1,
        slot=SlotId("s6"),
        rank=Rank(6),
        epoch=Epoch(1),
        signal=6,
    )
    out = NodeMoved(job=JOB, at=Nanos(2), node=NodeId("node-1"), to="DRAINING", why="moved")
    log: list[Record] = [Observed(job=JOB, at=Nanos(1), fact=ended), killed(1, 3), killed(1, 4), out]
    truth = Truth(ranks=(3,))
    found = innocent(truth, log, roster(), (3, 4, 6, 7), forgivable=())
    assert found == [
        "rank 4 was killed: named",
        "node-1 was taken out (DRAINING): moved",
        "rank 7 got another process",
    ]
    assert innocent(truth, [killed(1, 3), out], roster(), (3,), forgivable=("node-1",)) == []


def test_totals_are_of_all_trials_and_times_of_those_that_were_answered() -> None:
    """A trial without an answer is a wrong one, and has no time."""
    good = {"right": True, "declared_s": 3.0, "time_to_suspect_s": 0.3, "innocent": []}
    none = {"right": False, "declared_s": None, "time_to_suspect_s": None, "innocent": ["a", "b"]}
    found = summary([good, none])
    assert found["top1_accuracy"] == 0.5
    assert found["innocent_evictions"] == 2
    assert found["time_to_suspect_s"] == {"median": 0.3, "min": 0.3, "max": 0.3}


def test_no_node_is_struck_three_times_in_five_trials() -> None:
    """Three faults within ten minutes are held against the node itself, which is another question."""
    for seed in range(50):
        ranks = victims(5, random.Random(seed))
        nodes = [rank * NODES // RANKS for rank in ranks]
        assert max(nodes.count(node) for node in nodes) <= 2, f"seed {seed}"
    assert len({case.name for case in CASES}) == 10
