"""One verdict out of positions, stacks and connections: each of them has the word where it is the better witness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from keepstep.core.locate.hang import judge
from keepstep.core.locate.stall import Verdict
from keepstep.model.facts import RankStalled, StacksTaken
from keepstep.model.ids import Epoch, JobId, Nanos, NodeId, Rank, SlotId
from keepstep.model.position import Collective, GroupPosition, Link, RankPosition
from keepstep.model.stacks import Frame, ProcessStacks, ThreadStack
from keepstep.model.topology import Layout, Member, Place, Roster

JOB = JobId("lm")
SITE = "/opt/venv/lib/python3.11/site-packages/"
LOOP = Frame("train", "/srv/lm/train.py", 40)
REDUCE = (Frame("all_reduce", SITE + "torch/distributed/distributed_c10d.py", 2806), LOOP)
SPIN = (Frame("spin", "/srv/lm/train.py", 12), LOOP)
NEXT = (Frame("_try_get_data", SITE + "torch/utils/data/dataloader.py", 1243), LOOP)
LOCK = (Frame("wait", "/usr/lib/python3.11/threading.py", 320), Frame("load", "/srv/lm/data.py", 7))
READ = (Frame("load", "/srv/lm/data.py", 9), LOOP)
WORLD, NODES = 8, 4
PER = WORLD // NODES


def node(rank: int) -> NodeId:
    return NodeId(f"n{rank // PER}")


ROSTER = Roster(
    job=JOB,
    epoch=Epoch(65536),
    origin="controller",
    mode="fresh",
    world_size=WORLD,
    members=tuple(
        Member(rank=Rank(rank), node=node(rank), slot=SlotId(f"s{rank}"), local_rank=rank % PER)
        for rank in range(WORLD)
    ),
    places=tuple(Place(node=NodeId(f"n{n}"), host=f"10.0.0.{n}", keeper_port=1, peer_port=2) for n in range(NODES)),
    store_host="10.0.0.0",
    store_port=3,
)


def stalled(rank: int) -> RankStalled:
    return RankStalled(
        job=JOB, at=Nanos(1), node=node(rank), seq=1, slot=SlotId(f"s{rank}"), rank=Rank(rank), epoch=Epoch(65536),
        step=7, phase="STEP", started=101, finished=100, proc_state="S", busy=0.0, idle_s=12.0, limit_s=12.0,
    )  # fmt: skip


def position(rank: int, launched: int, *, source: str = "sdk", elements: int = 4096) -> RankPosition:
    last = Collective(sequence=launched, op="all_reduce", elements=elements, dtype="float32")
    group = GroupPosition(
        group="0", members=f"0-{WORLD - 1}", launched=launched, finished=100, last=last, recent=(last,),
        pending=(launched,) if launched > 100 else (),
    )  # fmt: skip
    return RankPosition(rank=Rank(rank), slot=SlotId(f"s{rank}"), groups=(group,), source=source)  # type: ignore[arg-type]


def process(
    rank: int, frames: tuple[Frame, ...] = REDUCE, state: str = "S", wchan: str = "", role: str = "trainer"
) -> ProcessStacks:
    return ProcessStacks(
        rank=Rank(rank), slot=SlotId(f"s{rank}"), pid=100 + rank, role=role, name="python", state=state, wchan=wchan,  # type: ignore[arg-type]
        how="py-spy", threads=(ThreadStack(name="MainThread", frames=frames, main=True),) if frames else (),
    )  # fmt: skip


def judged(
    positions: Mapping[int, RankPosition] | None = None,
    places: Mapping[int, ProcessStacks] | None = None,
    *,
    children: Sequence[ProcessStacks] = (),
    links: Sequence[Link] = (),
    shared_address: bool = False,
) -> Verdict:
    """All eight ranks wait in the same all-reduce, but for what is said."""
    at = {rank: position(rank, 101) for rank in range(WORLD)} | dict(positions or {})
    seen = {rank: process(rank) for rank in range(WORLD)} | dict(places or {})
    taken = [
        StacksTaken(
            job=JOB, at=Nanos(2), node=NodeId(f"n{n}"), seq=2, epoch=Epoch(65536), request=1,
            processes=tuple(p for p in [*seen.values(), *children] if node(p.rank) == f"n{n}"),
            positions=tuple(at[rank] for rank in range(WORLD) if node(rank) == f"n{n}"),
            links=tuple(link for link in links if node(link.rank) == f"n{n}"),
            addresses=("10.9.9.9",) if shared_address else (f"10.0.0.{n}",),
        )
        for n in range(NODES)
    ]  # fmt: skip
    return judge([stalled(rank) for rank in range(WORLD)], [], taken, ROSTER, Layout())


def test_a_rank_that_loops_in_its_own_code_is_named_and_its_node_is_not_to_blame() -> None:
    verdict = judged({3: position(3, 100)}, {3: process(3, SPIN, "R")})
    assert (verdict.ranks, verdict.category, verdict.kill) == ((3,), "user_code", True)
    assert verdict.probability > 0.95
    assert verdict.sentence == (
        "rank 3 has not launched all_reduce #101 (4,096 float32) of group 0, in which 7 ranks wait; "
        "it computes at spin (/srv/lm/train.py:12) < train (/srv/lm/train.py:40)"
    )
    assert any("rank 3: 100 done in group 0" in told for told in verdict.evidence)
    assert any("rank 0-2,4-7: in all_reduce #101" in told for told in verdict.evidence)


def test_a_rank_that_was_stopped_inside_of_the_operation_is_the_machines() -> None:
    """All have launched it; that no thread of rank 5 runs is what the kernel says."""
    verdict = judged(places={5: process(5, (), "T")})
    assert (verdict.ranks, verdict.category) == ((5,), "infrastructure")


def test_a_deadlocked_data_loader_is_named_with_what_its_workers_wait_for() -> None:
    verdict = judged(
        {2: position(2, 100)}, {2: process(2, NEXT)}, children=[process(2, LOCK, "S", "futex_wait", "child")]
    )
    assert (verdict.ranks, verdict.category) == ((2,), "data")
    assert "it waits for data" in verdict.reason
    assert verdict.evidence[0].startswith(
        "started by rank 2: python (pid 102) waits for a lock: wait (threading.py:320)"
    )


def test_a_rank_whose_file_does_not_come_is_its_nodes() -> None:
    verdict = judged({6: position(6, 100)}, {6: process(6, READ, "S", "request_wait_answer")})
    assert (verdict.ranks, verdict.category) == ((6,), "infrastructure")
    assert "waits for a file system or a device" in verdict.reason


def test_ranks_of_several_nodes_that_wait_for_storage_share_it_and_nobody_is_to_blame() -> None:
    reads = {rank: process(rank, READ, "D", "nfs_wait_bit_killable") for rank in (1, 6)}
    verdict = judged({rank: position(rank, 100) for rank in reads}, reads)
    assert verdict.ranks == ()
    assert "the storage is at fault" in verdict.reason


def test_all_ranks_that_wait_for_storage_blame_nobody() -> None:
    reads = {rank: process(rank, READ, "S", "request_wait_answer") for rank in range(WORLD)}
    verdict = judged({rank: position(rank, 100) for rank in reads}, reads)
    assert verdict.ranks == ()
    assert "file system" in verdict.reason


def test_another_size_is_the_code() -> None:
    verdict = judged({7: position(7, 101, elements=4095)})
    assert (verdict.ranks, verdict.category) == ((7,), "user_code")
    assert "launched all_reduce #101 (4,095 float32) where 7 other ranks" in verdict.reason


def test_all_ranks_of_one_node_point_at_the_node() -> None:
    """Two ranks do not come, and what they share is node n2; no stacks were to be had."""
    verdict = judged({4: position(4, 100), 5: position(5, 100)}, {4: process(4, ()), 5: process(5, ())})
    assert verdict.ranks == (4, 5)
    assert verdict.nodes == ("n2",)
    assert "node n2 explains 2 of 2 outliers" in verdict.reason


def test_ranks_with_nothing_in_common_are_less_sure() -> None:
    verdict = judged({1: position(1, 100), 6: position(6, 100)}, {1: process(1, ()), 6: process(6, ())})
    assert verdict.ranks == (1, 6)
    assert verdict.nodes == ()
    assert verdict.probability <= 0.5


def test_on_a_device_a_line_that_does_not_end_is_not_yet_the_code() -> None:
    """A hung kernel shows as the line that waits for it."""
    at = {rank: position(rank, 101, source="flight-recorder") for rank in range(WORLD)}
    verdict = judged(at | {3: position(3, 100, source="flight-recorder")}, {3: process(3, SPIN, "R")})
    assert (verdict.ranks, verdict.category) == ((3,), "unknown")


def link(rank: int, to: int) -> Link:
    return Link(
        rank=Rank(rank), local=f"10.0.0.{rank // PER}:4000", peer=f"10.0.0.{to // PER}:5000", unacked=900, timeouts=4
    )


def test_two_nodes_that_do_not_reach_each_other_are_a_pair() -> None:
    """Everybody has launched it; neither node alone is to blame, and nobody's process is ended for it."""
    verdict = judged(links=[link(0, 4), link(5, 1)])
    assert verdict.nodes == ("n0", "n2")
    assert verdict.ranks == (0, 1, 4, 5)
    assert (verdict.category, verdict.probability, verdict.kill) == ("infrastructure", 0.5, False)
    assert verdict.sentence == "nodes n0 and n2 do not reach each other: their connections get no answer"
    assert "rank 0 on n0: 900 bytes to 10.0.0.2:5000 (n2) were sent 4 times again" in verdict.evidence[0]


def test_a_node_that_nobody_reaches_is_named_alone() -> None:
    verdict = judged(links=[link(2, 0), link(3, 6), link(4, 2)])
    assert verdict.nodes == ("n1",)
    assert verdict.ranks == (2, 3)
    assert verdict.probability == pytest.approx(0.9)
    assert not verdict.kill


def test_silence_everywhere_is_the_fabric() -> None:
    verdict = judged(links=[link(0, 2), link(4, 6)])
    assert (verdict.ranks, verdict.nodes) == ((), ())
    assert "the fabric" in verdict.reason


def test_addresses_that_do_not_tell_the_nodes_apart_name_nobody() -> None:
    verdict = judged(links=[link(0, 4)], shared_address=True)
    assert verdict.ranks == ()
    assert "none of them is to blame" in verdict.reason


def test_ranks_of_a_node_that_has_not_answered_are_judged_by_their_counts() -> None:
    """No position of n3's ranks, and by what they said when they stalled they wait like all others."""
    silent = {rank: RankPosition(rank=Rank(rank), slot=SlotId(f"s{rank}"), groups=()) for rank in (6, 7)}
    assert judged(silent).ranks == ()


def test_all_inside_with_answers_names_nobody() -> None:
    verdict = judged()
    assert (verdict.ranks, verdict.probability) == ((), 0.0)
