"""Agree: properties of the choice of a common step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.agree import EXACT_WITHIN, ROW, Holdings, choose, explain
from keepstep.checkpoint.slot import Version

versions = st.builds(Version, st.integers(0, 6), st.integers(1, 3))
some = st.lists(versions, max_size=2, unique=True).map(tuple)


@st.composite
def worlds(draw: st.DrawFn) -> list[Holdings]:
    replicated = draw(st.booleans())
    return draw(
        st.lists(
            st.builds(
                Holdings,
                live=st.none() | versions,
                full=some,
                private=some,
                peer=some,
                saved=some,
                replicated=st.just(replicated),
            ),
            min_size=1,
            max_size=5,
        )
    )


@settings(deadline=None, max_examples=100)
@given(worlds())
def test_a_row_says_everything(rows: list[Holdings]) -> None:
    """What a rank shows in integers is what the others read."""
    for row in rows:
        assert len(row.to_row()) == ROW
        back = Holdings.from_row(row.to_row())
        assert back.all() == row.all()
        assert set(back.private) == set(row.private)
        assert (back.live, back.replicated) == (row.live, row.replicated)


@settings(deadline=None, max_examples=100)
@given(worlds())
def test_every_source_really_holds_the_step(rows: list[Holdings]) -> None:
    """The plan never sends a rank to a holder that does not have the version, epoch included."""
    plan = choose(rows)
    if plan is None:
        return
    for row, source in zip(rows, plan.sources, strict=True):
        held = {"live": (row.live,), "local": row.full, "peer": row.peer, "saved": row.saved}.get(source)
        if held is not None:
            assert plan.version in held
        else:
            assert row.replicated
            assert plan.version in rows[plan.root].all()


@settings(deadline=None, max_examples=100)
@given(worlds())
def test_no_newer_step_was_possible(rows: list[Holdings]) -> None:
    """Sharded: exactly the newest common version. Replicated: at most ``EXACT_WITHIN`` steps behind the newest."""
    plan = choose(rows)
    everything = set().union(*(row.all() for row in rows))
    common = {v for v in everything if all(v in row.all() for row in rows)}
    if not rows[0].replicated:
        assert (plan.version if plan else None) == max(common, default=None)
    elif everything:
        assert plan is not None
        assert plan.version.step >= max(everything).step - EXACT_WITHIN
    if plan is None:
        assert "no step has a holder" in explain(rows)


@settings(deadline=None, max_examples=100)
@given(worlds())
def test_the_same_rows_give_the_same_plan_in_any_process(rows: list[Holdings]) -> None:
    """Ranks decide each for itself: the plan depends on nothing but the rows."""
    assert choose(rows) == choose([Holdings.from_row(row.to_row()) for row in rows])


def test_states_of_two_histories_are_not_mixed() -> None:
    """Step 5 of epoch 1 and step 5 of epoch 2 are different states; all fall back to step 4."""
    rows = [
        Holdings(full=(Version(4, 1), Version(5, 1))),
        Holdings(full=(Version(4, 1), Version(5, 2))),
    ]
    plan = choose(rows)
    assert plan is not None
    assert plan.version == Version(4, 1)


def test_one_step_is_done_again_so_that_no_random_state_is_lost() -> None:
    """Rank 1 died between optimizer and commit: its own step 4 is better than rank 0's step 5 without its dropout."""
    rows = [
        Holdings(live=Version(5, 1), full=(Version(4, 1), Version(5, 1)), replicated=True),
        Holdings(full=(Version(4, 1), Version(3, 1)), private=(Version(4, 1),), replicated=True),
    ]
    plan = choose(rows)
    assert plan is not None
    assert (plan.version, plan.sources) == (Version(4, 1), ("local", "local"))


def test_a_live_replica_saves_a_rank_of_which_nothing_is_left() -> None:
    """Replicated, snapshots off, node gone: the newest live rank hands over; the step is not lost."""
    rows = [
        Holdings(live=Version(9, 1), private=(Version(9, 1),), replicated=True),
        Holdings(replicated=True),
    ]
    plan = choose(rows)
    assert plan is not None
    assert (plan.version, plan.sources, plan.root) == (Version(9, 1), ("live", "replica"), 0)


def test_a_newer_step_in_memory_goes_before_a_saved_one() -> None:
    """All ranks hold step 7 in memory and step 5 on disk: the disk is not asked."""
    plan = choose([Holdings(full=(Version(7, 1),), saved=(Version(5, 1),)) for _ in range(3)])
    assert plan is not None
    assert (plan.version, plan.sources) == (Version(7, 1), ("local", "local", "local"))


def test_one_rank_without_memory_takes_all_back_to_the_saved_step() -> None:
    rows = [Holdings(full=(Version(7, 1),), saved=(Version(5, 1),)), Holdings(saved=(Version(5, 1),))]
    plan = choose(rows)
    assert plan is not None
    assert (plan.version, plan.sources, plan.newest) == (Version(5, 1), ("saved", "saved"), 7)


def test_what_is_saved_of_a_step_completes_what_is_in_memory() -> None:
    """The same version is the same state wherever it lies: only the rank without memory reads the disk."""
    rows = [Holdings(full=(Version(5, 1),), saved=(Version(5, 1),)), Holdings(saved=(Version(5, 1),))]
    plan = choose(rows)
    assert plan is not None
    assert plan.sources == ("local", "saved")


def test_the_newest_are_shown_where_there_are_more_than_room() -> None:
    many = tuple(Version(step, 1) for step in range(9))
    back = Holdings.from_row(Holdings(full=many, saved=many).to_row())
    assert back.full == (Version(8, 1), Version(7, 1), Version(6, 1))
    assert back.saved == (Version(8, 1), Version(7, 1), Version(6, 1), Version(5, 1))
