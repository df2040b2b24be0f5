"""Investigations of silent corruption: no machine goes on a first sighting, and none that comes again stays.

Each history is folded again from its log while it happens (``Fleet.checked``), so no state hides outside of records.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.cases import Investigation
from keepstep.core.state import INVESTIGATIONS_KEPT
from keepstep.core.summary import incident_block
from keepstep.model.actions import SelfTest, TaintCheckpoints
from keepstep.model.facts import GuardNoted, OperatorSaid, SelfTestDone
from keepstep.model.facts_people import Verb
from keepstep.model.ids import NodeId, Rank
from keepstep.model.records import InvestigationMoved, Noted, Ordered, ProposalMoved
from keepstep.model.settings import Policy
from tests.core.fleet import JOB, Fleet, replay, running

WHY = "rank 2 differs from the majority of its replicas in p/m/w; training goes back to step 8"


def fleet(**words: Any) -> Fleet:
    made = running(standby_nodes=1, **words)
    made.checked, made.shadow = True, replay(made.log)
    return made


def guard(made: Fleet, what: str, *ranks: int, **words: Any) -> None:
    said = {"step": 11, "why": "because", **words}
    made.say(NodeId("n0"), GuardNoted, what=what, ranks=tuple(map(Rank, ranks)), **said)
    made.pump()


def examined(made: Fleet, node: str, *, passed: bool | None, request: int = 1, digest: str = "ab") -> None:
    failed = () if passed or passed is None else ("gemm on core 3: row 4, column 9: 17 instead of 19",)
    made.say(
        NodeId(node), SelfTestDone, request=request, test="gemm", passed=passed, digest=digest, rounds=5, seconds=3.0,
        failed=failed, why="no torch" if passed is None else "",
    )  # fmt: skip
    made.pump()


def says(made: Fleet, verb: Verb, subject: str = "", other: str = "", *ranks: int) -> None:
    who = tuple(map(Rank, ranks))
    made.tell(
        OperatorSaid(job=JOB, at=made.now, verb=verb, by="ada", subject=subject, other=other, why="seen", ranks=who)
    )
    made.pump()


def states(made: Fleet, number: int = 1) -> list[str]:
    name = f"lm-sdc{number}"
    return [r.to for r in made.log if isinstance(r, InvestigationMoved) and r.investigation == name]


def case(made: Fleet, number: int = 1) -> Investigation:
    return made.job.investigations[f"lm-sdc{number}"]


def orders(made: Fleet, kind: type) -> list[Any]:
    return [r.action for r in made.log if isinstance(r, Ordered) and isinstance(r.action, kind)]


def evictions(made: Fleet) -> list[ProposalMoved]:
    return [r for r in made.log if isinstance(r, ProposalMoved) and r.to == "PROPOSED"]


def flip(made: Fleet, *, step: int = 11, rank: int = 2, verdict: str = "transient") -> None:
    """The guard's words about one flipped bit, from sighting to verdict."""
    guard(made, "replicas", rank, step=step, why=WHY, tensor="p/m/w", since=8)
    guard(made, "rolled_back", step=step, since=8)
    guard(made, "judged", rank, step=step, verdict=verdict, why="done again")


def test_a_passing_fault_is_soaked_and_then_cleared() -> None:
    """The suspect and one healthy node do the same self-test; nobody is taken out; the page tells the whole story."""
    made = fleet()
    flip(made)
    assert states(made) == ["SUSPECTED", "REPLAY", "VOTE", "SOAK"]
    assert (case(made).ranks, case(made).nodes) == ((2,), ("n1",))
    tests = orders(made, SelfTest)
    assert [order.node for order in tests] == ["n1", "n0"], "the suspect, and another to compare it with"
    assert len({order.seed for order in tests}) == 1, "equal seeds make their digests comparable"
    assert tests[0].share < 1, "training goes on there"
    examined(made, "n0", passed=True)
    assert case(made).state == "SOAK", "a healthy node's result clears nobody"
    examined(made, "n1", passed=True)
    assert states(made)[-1] == "CLEARED"
    assert evictions(made) == []
    page = "\n".join(incident_block(made.log, "lm-i1"))
    for word in ("silent data corruption", "rank 2", "p/m/w", "SOAK", "CLEARED", "same digest"):
        assert word in page, page


def test_what_may_be_spoilt_is_marked_and_stays_marked() -> None:
    """The corruption was real although nobody could be convicted: marks are only taken away for data or code."""
    made = fleet()
    flip(made)
    examined(made, "n1", passed=True)
    marks = orders(made, TaintCheckpoints)
    assert [(order.node, order.since, order.until, order.clear) for order in marks] == [
        ("n0", 8, 12, False),
        ("n1", 8, 12, False),
    ]
    assert marks[0].before > 0, "what is written later is of steps done again"


def test_a_failed_self_test_convicts_and_the_node_goes() -> None:
    """Mode auto: the node's ranks move to the standby node, with the failed work as evidence."""
    made = fleet()
    flip(made)
    examined(made, "n1", passed=False)
    assert states(made)[-1] == "CONFIRMED"
    (proposal,) = evictions(made)
    assert (proposal.kind, proposal.nodes, proposal.incident) == ("evict", ("n1",), "lm-i1")
    assert any("17 instead of 19" in line for line in proposal.evidence)
    assert not made.job.in_roster(NodeId("n1"))


@pytest.mark.parametrize("mode", ["observe", "assist"])
def test_nobody_goes_where_a_person_decides(mode: Any) -> None:
    """The verdict is the same, and the node stays until somebody approves."""
    made = fleet(policy=Policy(mode=mode))
    flip(made)
    examined(made, "n1", passed=False)
    assert case(made).state == "CONFIRMED"
    assert [one.state for one in made.job.proposals.values()] == ["PROPOSED"]
    assert made.job.in_roster(NodeId("n1"))


def test_the_same_rank_wrong_again_is_hardware() -> None:
    """No self-test is needed where doing it again went wrong on one rank only."""
    made = fleet()
    flip(made, verdict="hardware")
    assert states(made) == ["SUSPECTED", "REPLAY", "CONFIRMED"]
    assert len(evictions(made)) == 1


@pytest.mark.parametrize("verdict", ["data", "software"])
def test_data_and_code_clear_the_machine(verdict: str) -> None:
    """No machine is suspected any more, and the marks go."""
    made = fleet()
    flip(made, verdict=verdict)
    assert states(made)[-1] == "CLEARED"
    assert evictions(made) == []
    assert [order.clear for order in orders(made, TaintCheckpoints)] == [False, False, True, True]
    assert made.job.incidents[next(iter(made.job.incidents))].category == ("data" if verdict == "data" else "user_code")


def test_bad_data_without_a_suspect_is_an_incident_of_its_own() -> None:
    """A batch that makes NaN: an incident that names the samples, and no investigation of a machine."""
    made = fleet()
    guard(made, "nonfinite", 1, why="not a finite number: loss of 1 rank; training goes back to step 8")
    guard(made, "judged", 1, verdict="data", why="left out, it is well", batches=("data:3,9",))
    assert made.job.investigations == {}
    page = "\n".join(incident_block(made.log, "lm-i1"))
    assert "a batch makes the numbers go wrong" in page
    assert made.job.incidents[next(iter(made.job.incidents))].evidence[-1] == "batch: data:3,9"
    assert made.job.incidents[next(iter(made.job.incidents))].suspects == ()


def test_what_passed_and_names_nobody_accuses_nobody() -> None:
    """A spike that is gone when the step is done again may have been anything, other input included."""
    made = fleet()
    guard(made, "spike", why="loss 9 above 2; training goes back to step 8")
    guard(made, "judged", verdict="transient", why="it had not the same input again")
    assert made.job.investigations == {}
    (told,) = made.job.incidents.values()
    assert (told.category, told.node, told.suspects) == ("transient", None, ())
    assert "wrong once, and right when the step was done again" in told.reason


def test_the_second_corruption_from_one_machine_convicts() -> None:
    """Each one passed, on two ranks of the same node, and the self-test found nothing: it is the node all the same."""
    made = fleet()
    flip(made)
    examined(made, "n1", passed=True)
    guard(made, "replicas", 3, step=40, why=WHY, since=32)
    assert states(made, 2) == ["SUSPECTED"], "what came of it is not known yet"
    assert evictions(made) == []
    guard(made, "judged", 3, step=40, verdict="transient", why="done again")
    assert states(made, 2)[-1] == "CONFIRMED"
    assert [one.nodes for one in evictions(made)] == [("n1",)]


def test_a_second_sighting_that_was_data_convicts_nobody() -> None:
    made = fleet()
    flip(made)
    examined(made, "n1", passed=True)
    flip(made, step=40, rank=3, verdict="data")
    assert states(made, 2)[-1] == "CLEARED"
    assert evictions(made) == []


def test_seen_again_while_it_examines_itself() -> None:
    """The verdict counts, not the sighting; and the machine, not the rank's number."""
    made = fleet()
    flip(made)
    guard(made, "replicas", 2, step=40, why=WHY, since=32)
    assert states(made)[-1] == "SOAK"
    guard(made, "judged", 2, step=40, verdict="transient", why="done again")
    assert states(made)[-1] == "CONFIRMED"
    assert [one.nodes for one in evictions(made)] == [("n1",)]


def test_machines_that_differ_in_turn_are_not_it() -> None:
    """Ranks of both nodes, one after the other: what they have in common is at fault."""
    made = fleet()
    for number, rank in enumerate((0, 2, 1, 3), 1):
        flip(made, step=10 * number, rank=rank)
        examined(made, "n1" if rank > 1 else "n0", passed=True, request=number)
    assert [states(made, number)[-1] for number in (1, 2, 3, 4)] == ["CLEARED"] * 4
    assert evictions(made) == []


def test_a_rank_that_takes_it_along_clears_the_machine() -> None:
    """The suspect's rank has moved to another node and differs there, too."""
    made = fleet()
    flip(made)
    made.lose("n1")
    made.broken(0)
    made.pump()
    made.later(1.0)
    made.pump()
    assert case(made).state == "SOAK"
    guard(made, "judged", 2, step=40, verdict="transient", why="done again")
    assert case(made).state == "CLEARED"
    assert "the same rank differs on n1 and x0" in case(made).why
    assert evictions(made) == []


def test_a_rank_that_is_none_accuses_nobody() -> None:
    made = fleet()
    guard(made, "replicas", -1, why=WHY, since=8)
    assert case(made).nodes == ()


def test_a_second_corruption_long_after_is_a_first_one() -> None:
    """Beyond ``sdc_window_s`` nothing is held against the machine."""
    made = fleet(policy=Policy(sdc_window_s=60.0))
    flip(made)
    examined(made, "n1", passed=True)
    made.later(61.0)
    guard(made, "replicas", 3, step=40, why=WHY, since=32)
    assert states(made, 2) == ["SUSPECTED"]


def test_an_exonerated_machine_has_no_record() -> None:
    """What was data is not held against the node it came up on."""
    made = fleet()
    flip(made, verdict="data")
    guard(made, "replicas", 3, step=40, why=WHY, since=32)
    assert states(made, 2) == ["SUSPECTED"]


def test_two_replicas_name_nobody_until_the_steps_are_done_again() -> None:
    """A tie is suspected without a rank; the verdict names one, and only then is a machine examined."""
    made = fleet()
    guard(made, "replicas", why="ranks 0, 1 differ and there is no majority; training goes back to step 8", since=8)
    guard(made, "rolled_back", since=8)
    assert case(made).nodes == ()
    guard(made, "judged", 1, verdict="transient", why="rank 1 comes to another result now")
    assert states(made)[-1] == "SOAK"
    assert case(made).nodes == ("n0",)


def test_a_tie_that_nobody_resolves_is_closed() -> None:
    """There is nobody to examine."""
    made = fleet()
    guard(made, "replicas", why="no majority; training goes back to step 8", since=8)
    guard(made, "judged", verdict="transient", why="gone")
    assert states(made)[-1] == "CLEARED"


def test_a_guard_that_only_tells_still_leads_to_a_test() -> None:
    """Mode observe of the guard: nothing is done again, so the vote has to do."""
    made = fleet()
    guard(made, "replicas", 2, why="rank 2 differs; nothing is done about it", since=8)
    assert states(made) == ["SUSPECTED", "VOTE", "SOAK"]


def test_a_test_that_cannot_be_made_leaves_it_to_a_person() -> None:
    """It is said, the investigation stays, and a person can close it either way."""
    made = fleet()
    flip(made)
    examined(made, "n1", passed=None)
    assert case(made).state == "SOAK"
    assert any("could not examine itself: no torch" in r.text for r in made.log if isinstance(r, Noted))
    says(made, "sdc-close", "lm-sdc1", "CLEARED")
    assert case(made).state == "CLEARED"
    assert [order.clear for order in orders(made, TaintCheckpoints)][-1]


def test_of_two_suspects_each_has_to_pass() -> None:
    """One of them that passes clears nobody."""
    made = fleet()
    guard(made, "replicas", 0, 2, why="ranks 0 and 2 differ; nothing is done about it", since=8)
    assert set(case(made).nodes) == {"n0", "n1"}
    examined(made, "n0", passed=True)
    assert case(made).state == "SOAK"
    examined(made, "n1", passed=True)
    assert case(made).state == "CLEARED"


def test_a_test_that_never_reports_ends_without_a_verdict() -> None:
    """Its agent was lost, say. What was seen is still held against the machine."""
    made = fleet()
    flip(made)
    made.later(made.mind.policy.soak_s + made.mind.policy.soak_patience_s + 1)
    assert states(made)[-1] == "CLEARED"
    assert "no self-test came to an end" in case(made).why
    flip(made, step=40, rank=3)
    assert states(made, 2)[-1] == "CONFIRMED"


WORDS = st.one_of(
    st.builds(
        lambda what, ranks, step, verdict, since: ("guard", what, ranks, step, verdict, since),
        st.sampled_from(["nonfinite", "spike", "replicas", "rolled_back", "gone", "judged", "quarantined"]),
        st.sets(st.integers(0, 3), max_size=2),
        st.sampled_from([11, 12, 40]),
        st.sampled_from(["", "data", "software", "transient", "hardware"]),
        st.sampled_from([None, 8]),
    ),
    st.builds(
        lambda node, passed, request: ("test", node, passed, request),
        st.sampled_from(["n0", "n1", "x0"]),
        st.sampled_from([True, False, None]),
        st.integers(1, 4),
    ),
    st.builds(
        lambda verb, number, state, ranks: ("say", verb, number, state, ranks),
        st.sampled_from(["sdc-open", "sdc-step", "sdc-close"]),
        st.integers(1, 4),
        st.sampled_from(["REPLAY", "VOTE", "SOAK", "CONFIRMED", "CLEARED", "SUSPECTED", "NONE"]),
        st.sets(st.integers(0, 5), max_size=2),
    ),
    st.builds(lambda rank: ("kill", rank), st.integers(0, 3)),
    st.builds(lambda seconds: ("later", seconds), st.sampled_from([1.0, 2000.0])),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(WORDS, max_size=12), st.sampled_from(["observe", "assist", "auto"]))
def test_no_order_of_words_confuses_an_investigation(words: list[Any], mode: Any) -> None:
    """Guards, self-tests, people, lost ranks and time in any order: no illegal move, the log rebuilds the state, and
    nobody is evicted for corruption without a verdict."""
    made = fleet(policy=Policy(mode=mode))
    for kind, *more in words:
        if made.job.over:
            break
        if kind == "guard":
            what, ranks, step, verdict, since = more
            guard(made, what, *sorted(ranks), step=step, verdict=verdict if what == "judged" else "", since=since)
        elif kind == "test":
            node, passed, request = more
            examined(made, node, passed=passed, request=request)
        elif kind == "say":
            verb, number, state, ranks = more
            says(made, verb, f"lm-sdc{number}", state, *sorted(ranks))
        elif kind == "kill":
            if made.holder(more[0]) is not None:
                made.kill(more[0])
                made.pump()
        else:
            made.later(more[0])
    moves = [r for r in made.log if isinstance(r, InvestigationMoved) and r.to == "CONFIRMED"]
    convicted = {node for move in moves for node in made.job.investigations[move.investigation].nodes}
    ours = [one for one in evictions(made) if one.why.startswith("silent data corruption")]
    assert {node for one in ours for node in one.nodes} <= convicted


def test_people_open_step_and_close() -> None:
    """A person's word is one like any other: the same table, the same orders, the same proposal."""
    made = fleet()
    says(made, "sdc-open", "", "", 3)
    assert (states(made), case(made).nodes) == (["SUSPECTED"], ("n1",))
    says(made, "sdc-step", "lm-sdc1", "soak")
    assert [order.node for order in orders(made, SelfTest)] == ["n1", "n0"]
    says(made, "sdc-close", "lm-sdc1", "confirmed")
    assert case(made).state == "CONFIRMED"
    assert [one.nodes for one in evictions(made)] == [("n1",)]


@pytest.mark.parametrize(
    ("verb", "subject", "other", "ranks", "why"),
    [
        ("sdc-open", "", "", (), "names no rank"),
        ("sdc-open", "", "", (9,), "there is no rank 9; the world has 4 ranks"),
        ("sdc-step", "lm-sdc7", "SOAK", (), "there is no investigation lm-sdc7"),
        ("sdc-step", "lm-sdc1", "GUILTY", (), "'GUILTY' is no state"),
        ("sdc-step", "lm-sdc1", "SUSPECTED", (), "lm-sdc1 is SOAK; from there it goes to CONFIRMED, CLEARED"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_way_out(
    verb: Verb, subject: str, other: str, ranks: tuple[int, ...], why: str
) -> None:
    """Nothing moves, and the log says why."""
    made = fleet()
    flip(made)
    before = states(made)
    says(made, verb, subject, other, *ranks)
    assert states(made) == before
    assert why in [r.text for r in made.log if isinstance(r, Noted)][-1]


def test_an_open_incident_is_not_disturbed() -> None:
    """While a lost rank is replaced the investigation is opened without a page of its own."""
    made = fleet()
    made.slow = {Rank(0)}
    made.kill(1)
    made.pump()
    assert made.job.current is not None
    guard(made, "replicas", 2, why=WHY, since=8)
    assert case(made).incident is None
    assert len(made.job.incidents) == 1


def test_a_case_that_a_person_clears_takes_its_proposal_along() -> None:
    """Convicted while no spare node was there, cleared, and then one comes: the node stays."""
    made = running()
    flip(made, verdict="hardware")
    assert [one.state for one in made.job.proposals.values()] == ["APPROVED"]
    says(made, "sdc-close", "lm-sdc1", "CLEARED")
    assert [one.state for one in made.job.proposals.values()] == ["REJECTED"]
    made.connect("x0", standby=True)
    made.pump()
    assert made.job.in_roster(NodeId("n1"))


def test_a_soak_that_a_person_orders_ends_without_a_report() -> None:
    made = fleet()
    says(made, "sdc-open", "", "", 2)
    says(made, "sdc-step", "lm-sdc1", "SOAK")
    assert case(made).state == "SOAK"
    made.later(made.mind.policy.soak_s + made.mind.policy.soak_patience_s + 1)
    assert case(made).state == "CLEARED"


def test_nobody_speaks_as_automation_about_a_case() -> None:
    made = fleet()
    made.tell(OperatorSaid(job=JOB, at=made.now, verb="sdc-open", by="auto", ranks=(Rank(2),), why="seen"))
    assert not made.job.investigations


def test_an_open_case_is_never_forgotten() -> None:
    """However many are opened and closed after it."""
    made = running()
    says(made, "sdc-open", "", "", 2)
    for number in range(2, INVESTIGATIONS_KEPT + 4):
        says(made, "sdc-open", "", "", 0)
        says(made, "sdc-close", f"lm-sdc{number}", "CLEARED")
    assert case(made).open
    assert len(made.job.investigations) == INVESTIGATIONS_KEPT


def test_a_mark_that_a_node_did_not_hear_of_reaches_it_later() -> None:
    """Its connection is down while the marks are ordered, and a new epoch is opened before it is back."""
    made = running(standby_nodes=1)
    made.agents[NodeId("n1")].linked = False
    flip(made)
    made.kill(0)
    for _ in range(3):
        made.pump()
    assert made.job.epoch > orders(made, TaintCheckpoints)[0].epoch
    waiting = [order for order in made.mind.pending_orders(NodeId("n1")) if isinstance(order, TaintCheckpoints)]
    assert [order.since for order in waiting] == [8]
