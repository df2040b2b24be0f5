"""Who is to blame: exits by themselves, and the vote over a stall."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from keepstep.core.locate.exits import judge, words
from keepstep.core.locate.stacks import Consensus, Place
from keepstep.core.locate.stall import vote, weigh
from keepstep.model.facts import RankStalled, UserError, WorkerExited
from keepstep.model.ids import Epoch, JobId, Nanos, NodeId, Rank, SlotId

JOB = JobId("lm")


def ended(**how: Any) -> WorkerExited:
    return WorkerExited(
        job=JOB, at=Nanos(1), node=NodeId("n0"), seq=1, slot=SlotId("s0"), rank=Rank(0), epoch=Epoch(65536), **how
    )


def error(*, consequence: bool = False) -> UserError:
    return UserError(type="ValueError", message="bad", file="train.py", line=3, step=7, consequence=consequence)


def at(rank: int, started: int, finished: int) -> RankStalled:
    return RankStalled(
        job=JOB, at=Nanos(1), node=NodeId("n0"), seq=1, slot=SlotId(f"s{rank}"), rank=Rank(rank), epoch=Epoch(65536),
        step=7, phase="STEP", started=started, finished=finished, proc_state="S", busy=0.0, idle_s=12.0, limit_s=12.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fact", "category", "consequence"),
    [
        (ended(signal=9), "infrastructure", False),
        (ended(signal=7), "infrastructure", False),
        (ended(signal=11), "unknown", False),
        (ended(), "infrastructure", False),
        (ended(code=137), "unknown", False),
        (ended(code=3), "user_code", False),
        (ended(code=1, error=error()), "user_code", False),
        (ended(code=1, error=error(consequence=True)), "transient", True),
        (ended(code=1, stderr_tail=("RuntimeError: Connection closed by peer",)), "transient", True),
        (ended(signal=6, stderr_tail=("terminate: ncclRemoteError",)), "transient", True),
        (ended(signal=9, stderr_tail=("Connection reset by peer",)), "infrastructure", False),
        (ended(signal=9, killed_by_us=True), "unknown", False),
    ],
)
def test_exit_is_judged_by_what_it_says(fact: WorkerExited, category: str, consequence: bool) -> None:
    """Killed from outside, ended by its own code, or a victim of somebody else's end."""
    judged = judge(fact, amid=False)
    assert (judged.category, judged.consequence) == (category, consequence)


def test_bare_failure_amid_another_fault_is_its_echo() -> None:
    """An exit code without an exception is blamed on the user only while nothing else is known to be wrong."""
    assert judge(ended(code=1), amid=True).consequence
    assert not judge(ended(code=1, error=error()), amid=True).consequence


def test_exit_in_words() -> None:
    """The sentence that the operator reads names the exception and its place, else the last words on stderr."""
    assert words(ended(signal=9)) == "killed by SIGKILL"
    assert words(ended(code=1, error=error())) == "exit code 1 (ValueError: bad at train.py:3)"
    assert words(ended(code=2, stderr_tail=("usage: x", "  error: no such file  ", ""))) == (
        "exit code 2 (error: no such file)"
    )
    assert words(ended()) == "gone, nobody saw how"


def test_rank_that_never_came_is_guilty() -> None:
    """Three wait in collective 101, one has not launched it: both signs agree."""
    verdict = vote([at(0, 101, 100), at(1, 101, 100), at(2, 100, 100), at(3, 101, 100)])
    assert verdict.ranks == (2,)
    assert verdict.probability > 0.9


def test_rank_outside_is_guilty_even_with_the_same_count() -> None:
    """A rank whose part is over (a broadcast's source, say) and that does not come to the next one."""
    assert vote([at(0, 101, 100), at(1, 101, 100), at(2, 101, 101)]).ranks == (2,)


def test_everybody_inside_the_same_one_convicts_nobody() -> None:
    """Then the network or the library holds them all."""
    verdict = vote([at(rank, 101, 100) for rank in range(4)])
    assert verdict.ranks == ()
    assert "none of them is to blame" in verdict.reason


def test_nobody_in_a_collective_convicts_nobody() -> None:
    """All ranks read from the same slow file system: nobody waits for anybody."""
    assert vote([at(rank, 100, 100) for rank in range(4)]).ranks == ()


def test_different_counts_of_half_the_ranks_convict_nobody() -> None:
    """Groups that are not the whole world make counts differ; only a minority is convicted."""
    assert vote([at(0, 90, 89), at(1, 90, 89), at(2, 101, 100), at(3, 101, 100)]).ranks == ()


def test_early_leaver_is_guilty() -> None:
    """A rank that left with code 0 before its loop was complete is whom the others wait for."""
    assert vote([at(0, 101, 100), at(1, 101, 100)], gone=[Rank(2)]).ranks == (2,)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=12))
def test_vote_never_convicts_a_majority(places: list[tuple[int, bool]]) -> None:
    """Whatever the positions: most ranks of a job are never killed on their account, and only real ranks are named."""
    positions = [at(rank, 100 + n, 100 + n - inside) for rank, (n, inside) in enumerate(places)]
    verdict = vote(positions)
    assert len(verdict.ranks) * 2 <= len(positions)
    assert set(verdict.ranks) <= set(range(len(positions)))
    assert (verdict.probability > 0) == bool(verdict.ranks)


def places(*what: tuple[str, tuple[int, ...]]) -> Consensus:
    """Who was seen where: the first place is the majority's, the ranks of the others are odd."""
    found = [
        Place(waits=waits, ranks=tuple(map(Rank, ranks)), frames=(waits,), shown="f (train.py:3)")  # type: ignore[arg-type]
        for waits, ranks in what
    ]
    odd = tuple(rank for place in found[1:] for rank in place.ranks)
    return Consensus(places=tuple(found), odd=odd, storage=all(place.waits == "storage" for place in found))


def test_stacks_that_agree_make_the_vote_surer() -> None:
    verdict = vote([at(0, 101, 100), at(1, 101, 100), at(2, 100, 100)])
    seen = weigh(verdict, places(("collective", (0, 1)), ("computing", (2,))))
    assert seen.ranks == verdict.ranks == (2,)
    assert verdict.probability < seen.probability < 1
    assert "rank 2 computes: f (train.py:3)" in seen.evidence


def test_stacks_that_point_elsewhere_do_not() -> None:
    verdict = vote([at(0, 101, 100), at(1, 101, 100), at(2, 100, 100)])
    seen = weigh(verdict, places(("collective", (1, 2)), ("computing", (0,))))
    assert (seen.ranks, seen.probability) == (verdict.ranks, verdict.probability)


def test_stacks_name_whom_the_vote_could_not() -> None:
    verdict = vote([at(rank, 101, 100) for rank in range(4)])
    seen = weigh(verdict, places(("collective", (0, 1, 2)), ("lock", (3,))))
    assert verdict.ranks == ()
    assert seen.ranks == (3,)
    assert "it waits for a lock" in seen.reason


def test_nobody_is_named_where_all_wait_for_storage() -> None:
    verdict = vote([at(0, 101, 100), at(1, 101, 100), at(2, 100, 100)])
    seen = weigh(verdict, places(("storage", (0, 1, 2))))
    assert (seen.ranks, seen.probability) == ((), 0.0)


def test_a_vote_without_stacks_stays_as_it_is() -> None:
    verdict = vote([at(0, 101, 100), at(1, 100, 100), at(2, 101, 100)])
    assert weigh(verdict, None) is verdict
