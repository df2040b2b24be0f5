"""Stragglers, from the facts of agents to notes and proposals: each cause told apart, and the innocent left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from keepstep.core.recover.act import unhurried
from keepstep.model.facts import RanksPaced
from keepstep.model.ids import Nanos, NodeId, Rank
from keepstep.model.pace import LinkPace, NodePace, RankPace
from keepstep.model.records import AnyRecord, ProposalMoved, StragglerNoted
from keepstep.model.settings import Policy
from keepstep.model.topology import Layout
from tests.core.fleet import SECOND, Fleet, replay, running

WINDOW_S = 30.0
STEP_S = 0.5
OWN_S = 0.4
COOL = NodePace(clock_mhz=2800.0, clock_limit_mhz=2900.0, throttled=0)
Change = Callable[[RankPace], RankPace]


class Paced:
    """A job whose agents tell of one window after another."""

    def __init__(self, *, nodes: int = 4, per_node: int = 2, **more: Any) -> None:
        self.fleet: Fleet = running(min_nodes=nodes, max_nodes=nodes, nproc_per_node=per_node, **more)
        self.window = 0

    @property
    def notes(self) -> list[StragglerNoted]:
        return [record for record in self.fleet.log if isinstance(record, StragglerNoted)]

    @property
    def proposals(self) -> list[ProposalMoved]:
        return [record for record in self.fleet.log if isinstance(record, ProposalMoved)]

    def pass_(
        self,
        windows: int = 1,
        *,
        changes: Mapping[int, Change] | None = None,
        machines: dict[str, NodePace] | None = None,
        links: Callable[[int], Iterable[LinkPace]] = lambda rank: (),
        silent: tuple[str, ...] = (),
    ) -> list[AnyRecord]:
        """So many windows, told by all nodes but the silent ones. Waiting fills up each step to the longest rank's."""
        before = len(self.fleet.log)
        for _ in range(windows):
            self.window += 1
            self.fleet.now = Nanos(self.fleet.now + int(WINDOW_S * SECOND))
            paces = {}
            for member in self.fleet.job.roster.members:  # type: ignore[union-attr]
                plain = RankPace(
                    rank=member.rank, first=60 * self.window, last=60 * (self.window + 1), step_s=STEP_S,
                    wait_s=STEP_S - OWN_S * (1 + 0.001 * ((member.rank * 7 + self.window) % 5)), cpu_s=OWN_S, size=128,
                    links=tuple(links(member.rank)),
                )  # fmt: skip
                change = (changes or {}).get(member.rank)
                paces[member.rank] = change(plain) if change else plain
            longest = max(pace.own_s for pace in paces.values()) + 0.1
            for node in dict.fromkeys(member.node for member in self.fleet.job.roster.members):  # type: ignore[union-attr]
                if node in silent:
                    continue
                mine = [
                    replace(pace, step_s=longest, wait_s=longest - pace.own_s)
                    for rank, pace in paces.items()
                    if self.fleet.job.seat_of(rank).node == node
                ]
                self.fleet.say(
                    node, RanksPaced, epoch=self.fleet.job.epoch, window=self.window, seconds=WINDOW_S,
                    ranks=tuple(mine), machine=(machines or {}).get(node, COOL),
                )  # fmt: skip
            self.fleet.pump()
        again = replay(self.fleet.log, self.fleet.mind.policy)
        assert again.dump() == self.fleet.mind.dump(), "the log does not rebuild the state"
        return self.fleet.log[before:]


def slower(factor: float, **parts: Any) -> Change:
    """Own time times so much; the excess is in the parts that are named, as shares of it."""

    def change(pace: RankPace) -> RankPace:
        excess = pace.own_s * (factor - 1.0)
        return replace(
            pace,
            wait_s=pace.step_s - pace.own_s * factor,
            **{name: getattr(pace, name) + excess * part for name, part in parts.items()},
        )

    return change


def test_evenly_fast_ranks_are_left_alone_for_an_hour() -> None:
    """120 windows without a note."""
    job = Paced()
    job.pass_(120)
    assert job.notes == []
    assert job.fleet.job.stragglers == {}


def test_a_slow_device_is_named_after_five_windows_and_once() -> None:
    """Rank 5 is slow, rank 4 beside it is not: the device. The sentence names it, and the note ends when it ends."""
    job = Paced()
    job.pass_(4, changes={5: slower(1.3)})
    assert job.notes == [], "four windows are not enough"
    job.pass_(6, changes={5: slower(1.3)})
    (note,) = job.notes
    assert (note.cause, note.ranks, note.nodes, note.over) == ("device", (5,), ("n2",), False)
    assert note.slowdown == pytest.approx((0.52 + 0.1) / (0.4 + 0.1), rel=0.02)
    assert note.why == "rank 5 on n2 is 1.3x slow: other ranks of its node are not; costs 19 % of the job"
    assert note.evidence[0].startswith("rank 5 on n2: 521.0 of 621.0 ms per step for itself")
    assert list(job.fleet.job.stragglers) == ["device:5"]
    job.pass_(1)
    assert len(job.notes) == 1, "one good window may be luck"
    job.pass_(1)
    assert [one.over for one in job.notes] == [False, True]
    assert job.fleet.job.stragglers == {}


@pytest.mark.parametrize("factor", [1.1, 1.2, 1.3])
def test_found_within_one_window_of_the_least(factor: float) -> None:
    """From 10 % on: pace_windows windows after it began, or one more."""
    job = Paced()
    job.pass_(7)
    job.pass_(6, changes={2: slower(factor)})
    assert [one.ranks for one in job.notes] == [(2,)]


@pytest.mark.parametrize(
    ("parts", "cause", "words"),
    [
        ({"data_s": 0.9}, "data", "waits for data"),
        ({"gc_s": 0.8}, "gc", "collects garbage"),
        ({"save_s": 0.8}, "save", "is held up by snapshots"),
        ({"starved_s": 0.7}, "starved", "is ready to run and has no processor"),
    ],
)
def test_what_no_machine_is_guilty_of(parts: dict[str, float], cause: str, words: str) -> None:
    """A part that explains the excess is its cause, even on a node that is warm, and no swap is thought of."""
    job = Paced(standby_nodes=1)
    hot = {"n2": NodePace(clock_mhz=1200.0, clock_limit_mhz=2900.0)}
    job.pass_(8, changes={5: slower(1.4, **parts)}, machines=hot)
    (note,) = job.notes
    assert (note.cause, note.ranks) == (cause, (5,))
    assert words in note.why
    assert job.proposals == []


def crowded(pace: RankPace) -> RankPace:
    """As on a node with too few processors: every rank waits for one, more or less by chance, wherever it is."""
    stolen = 0.05 + 0.25 * ((pace.rank * 37 + pace.first * 11) % 10) / 10
    return replace(
        pace, step_s=pace.step_s + 0.3, wait_s=pace.wait_s + 0.3 - stolen, starved_s=stolen, data_s=0.9 * stolen + 0.01
    )


def test_too_few_processors_everywhere_is_nobodys_fault() -> None:
    """Neither a rank nor the data is slow, although much of the time in both is spent waiting for a processor."""
    job = Paced()
    job.pass_(20, changes=dict.fromkeys(range(8), crowded))
    assert job.notes == []


def test_a_slow_rank_among_crowded_ones_is_seen_through_the_noise() -> None:
    """What the processors' queue takes is known, and left out of the comparison."""
    job = Paced()
    job.pass_(6, changes=dict.fromkeys(range(8), crowded) | {5: lambda pace: crowded(slower(1.3)(pace))})
    assert [(note.cause, note.ranks) for note in job.notes] == [("device", (5,))]


def test_uneven_input_is_no_slow_machine() -> None:
    """A rank that is given half as much again takes half as long again."""
    job = Paced(standby_nodes=1)
    job.pass_(6, changes={3: lambda pace: replace(slower(1.5)(pace), size=192)})
    (note,) = job.notes
    assert (note.cause, note.ranks) == ("input", (3,))
    assert "is given 50 % more input" in note.why
    assert job.proposals == []


def test_all_ranks_that_wait_for_data_are_one_note_about_storage() -> None:
    """Nobody's node is guilty, and none is named."""
    job = Paced()
    job.pass_(6, changes={rank: lambda pace: replace(pace, data_s=0.25) for rank in range(8)})
    (note,) = job.notes
    assert (note.cause, note.nodes, len(note.ranks)) == ("data", (), 8)
    assert "every rank waits for data" in note.why


def test_a_stage_with_more_layers_is_no_bad_machine() -> None:
    """Four stages of two ranks: the third one takes longer as a whole. Within a stage all are equal."""
    job = Paced(layout=Layout(tp=1, pp=4, dp=2))
    job.pass_(6, changes={4: slower(1.3), 5: slower(1.3)})
    (note,) = job.notes
    assert (note.cause, note.ranks, note.nodes) == ("pipeline", (4, 5), ())
    assert "stage 2 of 4 has more work" in note.why


def test_a_slow_rank_is_measured_against_its_own_stage() -> None:
    """Stages differ by a factor of two, and that is nobody's fault; rank 7 is slower than rank 6 of its stage."""
    job = Paced(nodes=2, per_node=4, layout=Layout(tp=1, pp=2, dp=4))
    uneven = {rank: slower(2.0) for rank in range(4, 8)}
    job.pass_(6, changes=uneven | {7: slower(2.6)})
    assert {one.cause: one.ranks for one in job.notes} == {"device": (7,), "pipeline": (4, 5, 6, 7)}


def test_a_node_that_is_too_hot() -> None:
    """All its ranks are slow and its clock is below the others': heat, with the numbers in the sentence."""
    job = Paced()
    hot = {"n1": NodePace(clock_mhz=1200.0, clock_limit_mhz=2900.0, throttled=9)}
    job.pass_(6, changes={2: slower(1.4), 3: slower(1.4)}, machines=hot)
    (note,) = job.notes
    assert (note.cause, note.ranks, note.nodes) == ("thermal", (2, 3), ("n1",))
    assert "ranks 2-3 on n1 are 1.4x slow: clock 1.2 of 2.9 GHz; costs" in note.why


def test_heat_that_holds_up_nobody_is_not_told() -> None:
    """A low clock alone is no straggler."""
    job = Paced()
    job.pass_(8, machines={"n1": NodePace(clock_mhz=1200.0, clock_limit_mhz=2900.0, throttled=9)})
    assert job.notes == []


def test_a_slow_node_that_is_not_hot() -> None:
    """All its ranks are slow, and nothing of ours explains it."""
    job = Paced()
    job.pass_(6, changes={2: slower(1.4), 3: slower(1.4)})
    (note,) = job.notes
    assert (note.cause, note.nodes) == ("node", ("n1",))
    assert "all 2 ranks of it are slow" in note.why


def test_two_kinds_of_machines_are_no_stragglers() -> None:
    """Half of the cluster is of an older kind: nobody there is broken."""
    job = Paced(nodes=6, per_node=1)
    job.pass_(8, changes={rank: slower(1.3) for rank in (0, 2, 4)})
    assert job.notes == []


def link(host: str, *, blocked: float = 0.4, resent: int = 0, size: int = 800_000_000) -> LinkPace:
    return LinkPace(host=host, bytes=size, resent=resent, rtt_ms=0.2, blocked_s=blocked)


def waiting(pace: RankPace) -> RankPace:
    """Nobody takes long for himself, and all wait."""
    return replace(pace, wait_s=pace.step_s - 0.2)


def test_a_slow_link_names_the_pair_and_evicts_nobody() -> None:
    """A ring of four nodes: the traffic between n1 and n2 does not get through. Which end it is cannot be seen."""
    job = Paced(per_node=1, standby_nodes=1)
    everybody = dict.fromkeys(range(4), waiting)

    def ring(rank: int) -> list[LinkPace]:
        nexts, before = (rank + 1) % 4, (rank - 1) % 4
        bad = 12.0 if rank == 1 else 0.4
        return [link(f"host-n{nexts}", blocked=bad), link(f"host-n{before}", size=1000, blocked=0.0)]

    job.pass_(6, changes=everybody, links=ring)
    (note,) = job.notes
    assert (note.cause, note.ranks, {*note.nodes, note.peer}) == ("link", (), {"n1", "n2"})
    assert "the link of n1 and n2 is blocked" in note.why
    assert job.proposals == []
    job.pass_(2, changes=everybody)
    assert [one.over for one in job.notes] == [False, True]


def test_the_node_whose_every_link_is_bad_is_named() -> None:
    """Losses on both sides of n2: its port, its cable."""
    job = Paced(per_node=1)

    def ring(rank: int) -> list[LinkPace]:
        nexts, before = (rank + 1) % 4, (rank - 1) % 4
        return [link(f"host-n{one}", resent=20_000 if 2 in (rank, one) else 3) for one in (nexts, before)]

    job.pass_(6, changes=dict.fromkeys(range(4), waiting), links=ring)
    (note,) = job.notes
    assert (note.cause, note.nodes, note.peer) == ("link", ("n2",), None)


def test_a_slow_network_is_no_slow_link() -> None:
    """Blocked everywhere alike."""
    job = Paced(per_node=1)
    everywhere = lambda rank: [link(f"host-n{one}", blocked=9.0) for one in range(4) if one != rank]  # noqa: E731
    job.pass_(8, changes=dict.fromkeys(range(4), waiting), links=everywhere)
    assert job.notes == []


def test_a_link_with_a_little_more_to_do_is_no_slow_link() -> None:
    """Blocked twice as long as the others, a tenth of the time: traffic is never quite even."""
    job = Paced(per_node=1)
    uneven = lambda rank: [link(f"host-n{(rank + 1) % 4}", blocked=3.0 if rank == 1 else 1.5)]  # noqa: E731
    job.pass_(8, changes=dict.fromkeys(range(4), waiting), links=uneven)
    assert job.notes == []


def test_a_window_that_a_node_leaves_out_is_not_judged() -> None:
    """Six windows, one of them without n3's word: five are left, and the fifth decides."""
    job = Paced()
    slow: dict[int, Change] = {5: slower(1.3)}
    job.pass_(2, changes=slow)
    job.pass_(1, changes=slow, silent=("n3",))
    job.pass_(2, changes=slow)
    assert job.notes == []
    job.pass_(1, changes=slow)
    assert [one.ranks for one in job.notes] == [(5,)]


def test_another_epoch_begins_anew() -> None:
    """What was measured before a recovery says nothing about the epoch behind it."""
    job = Paced(standbys=1)
    job.pass_(4, changes={5: slower(1.3)})
    job.fleet.kill(0)
    job.fleet.pump()
    job.fleet.train()
    job.pass_(4, changes={5: slower(1.3)})
    assert job.notes == []
    job.pass_(1, changes={5: slower(1.3)})
    assert [one.ranks for one in job.notes] == [(5,)]


def test_a_slow_node_is_swapped_for_a_spare_one() -> None:
    """Enough to win and a spare node there: proposed, approved within the limits, carried out as one more epoch."""
    job = Paced(standby_nodes=1)
    job.pass_(5, changes={4: slower(1.5), 5: slower(1.5)})
    assert [one.to for one in job.proposals] == ["PROPOSED", "APPROVED", "CARRIED_OUT"]
    first = job.proposals[0]
    assert (first.kind, first.nodes, first.ranks) == ("swap", ("n2",), (4, 5))
    assert "1.5x slow" in first.why
    roster = job.fleet.job.roster
    assert roster is not None
    assert [seat.node for seat in roster.members if seat.rank in (4, 5)] == ["x0", "x0"]
    assert roster.boundary_s == job.fleet.mind.policy.boundary_s, "nothing is broken: ranks finish their step"


def test_a_fault_is_never_asked_to_wait_for_the_end_of_a_step() -> None:
    """A process that was killed leaves a roster without a boundary."""
    job = Paced(standbys=1)
    job.fleet.kill(0)
    job.fleet.pump()
    roster = job.fleet.job.roster
    assert roster is not None
    assert roster.boundary_s == 0.0


def test_rank_zero_alone_is_busy_and_not_broken() -> None:
    """Scripts let it write logs and evaluate: told, and never swapped, unless its node is hot as well."""
    job = Paced(standby_nodes=1)
    job.pass_(7, changes={0: slower(1.5)})
    (note,) = job.notes
    assert (note.cause, note.ranks, note.probability) == ("work", (0,), 0.5)
    assert job.proposals == []
    hot = Paced(standby_nodes=1)
    hot.pass_(5, changes={0: slower(1.5)}, machines={"n0": NodePace(clock_mhz=900.0, clock_limit_mhz=2900.0)})
    assert [note.cause for note in hot.notes] == ["thermal"]
    assert hot.proposals


def test_a_rank_that_is_slow_everywhere_is_not_moved_twice() -> None:
    """Moved to the spare node, it is as slow as before: its work, and the second spare node stays where it is."""
    job = Paced(standby_nodes=2)
    job.pass_(5, changes={5: slower(1.5)})
    assert [one.to for one in job.proposals] == ["PROPOSED", "APPROVED", "CARRIED_OUT"]
    job.fleet.train()
    job.window = 0
    job.pass_(8, changes={5: slower(1.5)})
    assert [note.cause for note in job.notes] == ["device", "work"]
    assert "on n2 it was slow, too" in job.notes[-1].why
    assert len(job.proposals) == 3


@pytest.mark.parametrize(("kind", "patient"), [("swap", True), ("evict", False)])
def test_nobody_takes_another_step_with_a_node_under_suspicion(kind: str, patient: bool) -> None:
    """A slow node may finish its step; one that may compute wrong numbers may not."""
    job = Paced(standby_nodes=1, policy=Policy(mode="observe"))
    job.pass_(5, changes={4: slower(1.5), 5: slower(1.5)})
    ((name, one),) = job.fleet.job.proposals.items()
    approved = {name: replace(one, state="APPROVED", kind=kind)}
    assert unhurried(replace(job.fleet.job, proposals=approved), one.nodes) is patient
    assert not unhurried(replace(job.fleet.job, proposals=approved), (NodeId("n0"),)), "nobody has proposed that"


def test_what_is_not_worth_a_swap_is_only_told() -> None:
    """Below swap_gain, and where no spare node waits, nothing is proposed."""
    cheap = Paced(standby_nodes=1, policy=Policy(swap_gain=0.5))
    cheap.pass_(7, changes={4: slower(1.5), 5: slower(1.5)})
    alone = Paced()
    alone.pass_(7, changes={4: slower(1.5), 5: slower(1.5)})
    assert [len(cheap.notes), len(alone.notes)] == [1, 1]
    assert cheap.proposals == alone.proposals == []


def test_a_swap_that_nobody_approves_ends_with_its_reason() -> None:
    """Mode observe: proposed once, however often it is seen, and rejected when the node is fast again."""
    job = Paced(standby_nodes=1, policy=Policy(mode="observe"))
    job.pass_(9, changes={4: slower(1.5), 5: slower(1.5)})
    assert [one.to for one in job.proposals] == ["PROPOSED"]
    assert "observe" in job.proposals[0].held
    job.pass_(2)
    assert [one.to for one in job.proposals] == ["PROPOSED", "REJECTED"]
    assert "its reason is gone" in job.proposals[-1].why


def test_strange_reports_do_no_harm() -> None:
    """Ranks that sit elsewhere, numbers below zero, hosts that nobody knows, empty windows."""
    job = Paced()
    for window, ranks in enumerate(([], [99, -3], [0, 1, 2, 3, 4, 5, 6, 7]), 1):
        for node in ("n0", "n1", "n2", "n3"):
            paces = tuple(RankPace(rank=Rank(r), first=0, last=0, step_s=-1.0, links=(link("nowhere"),)) for r in ranks)
            job.fleet.say(NodeId(node), RanksPaced, epoch=job.fleet.job.epoch, window=window, seconds=0.0, ranks=paces)
        job.fleet.pump()
    assert job.notes == []
