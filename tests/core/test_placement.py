"""Placement: whatever is lost at once, a copy of every rank's state is left wherever theory allows that."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.cli.show import show_checkpoints
from keepstep.controlplane.views import job_view
from keepstep.model.ids import NodeId
from keepstep.model.placement import Domain, Host, Placement, domains, fit, judge, place
from keepstep.model.topology import Layout
from tests.core.fleet import Fleet, running

SMALL = 6
"""Nodes for which all placements can be tried."""


def hosts(count: int, per_node: int = 1, racks: tuple[str, ...] = ()) -> list[Host]:
    return [
        Host(NodeId(f"n{i}"), tuple(range(i * per_node, (i + 1) * per_node)), racks[i % len(racks)] if racks else "")
        for i in range(count)
    ]


def lost_together(nodes: list[Host], layout: Layout) -> list[tuple[str, set[NodeId]]]:
    """All domains once more, from the words of ``Layout`` and nothing else."""
    rank = {
        (p, d, t): (p * layout.dp + d) * layout.tp + t
        for p in range(layout.pp)
        for d in range(layout.dp)
        for t in range(layout.tp)
    }
    home = {r: host.node for host in nodes for r in host.ranks}
    found: dict[tuple[str, object], set[NodeId]] = {}
    for (p, d, t), number in rank.items() if layout.known else ():
        for kind, group in (("tp", (p, d)), ("dp", (p, t)), ("pp", (d, t))):
            if getattr(layout, kind) > 1:
                found.setdefault((kind, group), set()).add(home[number])
    for host in nodes:
        found.setdefault(("rack", host.rack), set()).add(host.node) if host.rack else None
        found["node", host.node] = {host.node}
    return [(kind, members) for (kind, _), members in found.items()]


def losing(homes: dict[NodeId, NodeId | None], found: tuple[Domain, ...]) -> set[str]:
    """Kinds of domains of which some member takes somebody's state with it."""
    placed = Placement(buddy=homes, pattern="")
    return {domain.kind for domain in found if placed.lost_with(domain.nodes)}


@st.composite
def layouts(draw: st.DrawFn, most: int) -> tuple[list[Host], Layout]:
    """Any number of ranks per node that divides the world, any racks, also where groups cut across nodes."""
    tp, pp, dp = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    world = tp * pp * dp
    sizes = [size for size in range(1, world + 1) if world % size == 0 and 2 <= world // size <= most]
    if not sizes:
        return hosts(draw(st.integers(2, most))), Layout()
    size = draw(st.sampled_from(sizes))
    count = world // size
    names = draw(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=count, max_size=count))
    return hosts(count, size, tuple(names)), Layout(tp=tp, pp=pp, dp=dp)


def given_up(nodes: list[Host], found: list[tuple[str, set[NodeId]]], homes: dict[NodeId, NodeId | None]) -> int:
    """The most that any node's copy gives up: the kinds of domains it shares with the original, by their worth."""
    worth = {"node": 100, "tp": 8, "dp": 4, "pp": 2, "rack": 1}
    shared = [{kind for kind, members in found if {host.node, homes[host.node]} <= members} for host in nodes]
    return max(sum(worth[kind] for kind in kinds) for kinds in shared)


@given(layouts(most=SMALL))
def test_no_shard_is_lost_whenever_that_is_possible(case: tuple[list[Host], Layout]) -> None:
    """Against the oracle that tries every placement: nobody gives up more than somebody has to."""
    nodes, layout = case
    placed, found = place(nodes, layout), lost_together(nodes, layout)
    names = [host.node for host in nodes]
    best = min(
        given_up(nodes, found, dict(zip(names, order, strict=True)))
        for order in permutations(names)
        if all(a != b for a, b in zip(names, order, strict=True))
    )
    got = losing(dict(placed.buddy), domains(nodes, layout))
    assert given_up(nodes, found, dict(placed.buddy)) == best
    assert got == {shortfall.kind for shortfall in placed.shortfalls}
    assert bool(got) == bool(best)


@given(layouts(most=24), st.data())
def test_every_node_holds_exactly_one_others_copies(case: tuple[list[Host], Layout], data: st.DataObject) -> None:
    """Balanced, never with itself, the same each time, and settled: placing again moves nothing."""
    nodes, layout = case
    previous = data.draw(
        st.dictionaries(
            st.sampled_from([h.node for h in nodes]), st.sampled_from([*(h.node for h in nodes), NodeId("gone")])
        )
    )
    placed = place(nodes, layout, previous)
    assert Counter(placed.buddy.values()) == Counter(host.node for host in nodes)
    assert all(node != home for node, home in placed.buddy.items())
    assert place(nodes, layout, previous) == placed
    assert place(nodes, layout, placed.buddy).buddy == placed.buddy


@given(layouts(most=24), st.data())
def test_only_what_must_change_does(case: tuple[list[Host], Layout], data: st.DataObject) -> None:
    """A node is replaced by one of the same rack: only its partners' words change, with or without telling who took
    over; and the newcomer's copies go where those of the lost one already are.
    """
    nodes, layout = case
    if len(nodes) < 3:
        return
    before = place(nodes, layout).buddy
    index = data.draw(st.integers(0, len(nodes) - 1))
    old, new = nodes[index].node, NodeId("new")
    after = [*nodes]
    after[index] = Host(new, nodes[index].ranks, nodes[index].rack)
    told = {(new if a == old else a): (new if b == old else b) for a, b in before.items()}
    assert place(after, layout, told).buddy == told
    assert place(after, layout, before).buddy == told


@given(st.integers(1, 40), st.booleans())
def test_one_group_makes_pairs(count: int, known: bool) -> None:
    """Each the other's; the last three in a ring when odd; a single node has nowhere to go."""
    homes = place(hosts(count), Layout(dp=count) if known else Layout()).buddy
    if count == 1:
        assert homes == {"n0": None}
        return
    lonely = [node for node, home in homes.items() if home is not None and homes[home] != node]
    assert len(lonely) == (3 if count % 2 else 0)


@given(st.lists(st.integers(1, 8), min_size=2, max_size=6))
def test_pairs_reach_across_racks(sizes: list[int]) -> None:
    """As long as no rack holds more than half of the nodes, no copy lies in its original's rack."""
    racks = tuple(f"r{number}" for number, size in enumerate(sizes) for _ in range(size))
    nodes = hosts(len(racks), 1, racks)
    rack = {host.node: host.rack for host in nodes}
    placed = place(nodes)
    inside = [node for node, home in placed.buddy.items() if home is not None and rack[node] == rack[home]]
    most = max(sizes)
    assert len(inside) == max(0, 2 * most - len(nodes))
    assert all("too many" in shortfall.why for shortfall in placed.shortfalls)


def test_the_example_of_two_hundred_and_fifty_six_nodes() -> None:
    """TP 8, PP 8, DP 32 in 32 racks: half way round both axes, so nodes are pairs, and nothing is lost."""
    nodes = [Host(NodeId(f"n{i:03}"), tuple(range(i * 8, i * 8 + 8)), f"r{i // 8}") for i in range(256)]
    layout = Layout(tp=8, pp=8, dp=32)
    placed = place(nodes, layout)
    assert placed.pattern == "shift pp +4, dp +16"
    assert placed.buddy["n000"] == "n144"
    assert not losing(dict(placed.buddy), domains(nodes, layout))
    assert not placed.shortfalls


def test_a_tensor_group_of_several_nodes_is_left_too() -> None:
    """TP 16 on nodes of 8: the other half of a tensor group is no home for copies."""
    nodes, layout = hosts(16, 8), Layout(tp=16, dp=8)
    assert not losing(dict(place(nodes, layout).buddy), domains(nodes, layout))


def test_no_shift_does_where_racks_cut_across() -> None:
    """Racks dealt so that every regular shift stays in one of them for somebody: matching finds a way."""
    racks = ("a", "b", "c", "a", "a", "c", "b", "b", "c", "a", "b", "c")
    nodes, layout = hosts(12, 2, racks), Layout(tp=2, pp=3, dp=4)
    placed = place(nodes, layout)
    assert "changed" in placed.pattern
    assert not losing(dict(placed.buddy), domains(nodes, layout))


def test_what_has_to_be_given_up_is_said() -> None:
    """One data-parallel group over all nodes cannot be left; a full rack neither."""
    placed = place(hosts(4, 2), Layout(dp=8))
    assert [(s.kind, len(s.nodes)) for s in placed.shortfalls] == [("dp", 4)]
    assert "every node" in placed.shortfalls[0].why


@given(layouts(most=24))
def test_a_placement_is_judged_as_it_was_made(case: tuple[list[Host], Layout]) -> None:
    """What the operator sees of a running job is what was known when its roster was made."""
    nodes, layout = case
    placed = place(nodes, layout)
    assert judge(nodes, layout, placed.buddy) == placed.shortfalls
    assert judge(nodes, layout, {}) == ()


def test_a_world_of_another_size_keeps_its_model_groups() -> None:
    """Fewer replicas than said are a smaller layout; a world that does not divide is none that we know."""
    said = Layout(tp=2, pp=2, dp=8)
    assert fit(said, 16) == Layout(tp=2, pp=2, dp=4)
    assert fit(said, 18) == Layout()
    assert fit(Layout(), 16) == Layout()


def test_two_thousand_nodes() -> None:
    """The mind asks at each roster; searching blindly would not end within the test's time."""
    racks = tuple(f"r{(i * 7919) % 61}" for i in range(2000))
    assert not place(hosts(2000, 8, racks), Layout(tp=8, pp=8, dp=250)).shortfalls


def buddies(fleet: Fleet) -> dict[NodeId, NodeId | None]:
    assert fleet.job.roster is not None
    return {at.node: at.buddy for at in fleet.job.roster.places}


def test_the_roster_knows_racks_and_keeps_its_homes() -> None:
    """Four nodes in two racks: pairs across them; a standby node takes over the lost one's place in the pattern."""
    racks = {"n0": "a", "n1": "a", "n2": "b", "n3": "b", "x0": "b"}
    fleet = running(min_nodes=4, max_nodes=4, standby_nodes=1, racks=racks)
    assert fleet.job.roster is not None
    assert [at.rack for at in fleet.job.roster.places] == ["a", "a", "b", "b"]
    before = buddies(fleet)
    assert all(home is not None and racks[node] != racks[home] for node, home in before.items())
    fleet.cut("n1")
    fleet.expire("n1")
    taker = next(node for node in buddies(fleet) if node not in before)
    moved = {NodeId("n1"): taker}
    assert buddies(fleet) == {
        moved.get(node, node): moved.get(home, home) for node, home in before.items() if home is not None
    }
    (short,) = job_view(fleet.job)["shared_domains"]
    assert short["why"] == "rack b has 3 of 4 nodes, too many for all their copies to lie outside"
    assert [node["rack"] for node in job_view(fleet.job)["nodes"]] == ["a", "a", "b", "b", "b"]


def test_the_roster_follows_the_layout() -> None:
    """Two stages of two replicas on four nodes: each node's copies leave its stage and its replica."""
    fleet = running(min_nodes=4, max_nodes=4, layout=Layout(tp=2, pp=2, dp=2))
    assert buddies(fleet) == {"n0": "n3", "n1": "n2", "n2": "n1", "n3": "n0"}
    assert job_view(fleet.job)["shared_domains"] == []


def test_the_operator_sees_what_could_not_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    """Both nodes in one rack: the copies are there all the same, and the job says what they do not survive."""
    fleet = running(racks={"n0": "a", "n1": "a"})
    (short,) = job_view(fleet.job)["shared_domains"]
    assert short == {"domain": "rack", "nodes": ["n0", "n1"], "why": "every node shares a rack with it"}
    show_checkpoints(job_view(fleet.job), "table")
    assert "copies share their rack: n[0-1] (every node shares a rack with it)" in capsys.readouterr().out
