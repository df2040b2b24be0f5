"""Notes that are alike: the first passes at once, the newest surely, and never more than one per span."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import limiter as module
from keepstep.checkpoint.limiter import ALIKE_S, Limiter
from keepstep.checkpoint.notes import Note, What


def note(step: int, what: What = "saved", rank: int | None = None) -> Note:
    return Note(what=what, tier="remote", step=step, rank=rank)


events = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["saved", "gap"]), st.sampled_from([None, 0, 1])), max_size=60
)


@given(events)
def test_of_each_kind_the_newest_arrives_and_at_most_one_per_span(
    happened: list[tuple[int, What, int | None]],
) -> None:
    """Whatever is offered when: per kind and span one note passes, none is lost uncounted, the newest is told last."""
    limiter, now = Limiter(), 0.0
    passed: dict[tuple[str, int | None], list[tuple[float, Note]]] = {}
    offered: dict[tuple[str, int | None], list[int]] = {}

    def take(found: list[Note]) -> None:
        for one in found:
            passed.setdefault((one.what, one.rank), []).append((now, one))

    for step, (wait, what, rank) in enumerate(happened):
        now += wait
        take(limiter.due(now))
        offered.setdefault((what, rank), []).append(step)
        through = limiter.offer(note(step, what, rank), now)
        take([through] if through is not None else [])
    now += ALIKE_S
    take(limiter.due(now))
    assert limiter.next_due is None
    for kind, steps in offered.items():
        told = passed[kind]
        assert told[0][1].step == steps[0]
        assert told[-1][1].step == steps[-1]
        assert all(b - a >= ALIKE_S for (a, _), (b, _) in itertools.pairwise(told))
        assert sum(1 + int(one.why.split()[0] if one.why else 0) for _, one in told) == len(steps)


def test_kinds_without_end_take_no_memory_without_end() -> None:
    """A sender that makes up ranks is cut off; when others have been quiet there is room again."""
    limiter = Limiter()
    told = [limiter.offer(note(1, rank=rank), 0.0) for rank in range(module.MAX_KINDS + 10)]
    assert sum(one is not None for one in told) == module.MAX_KINDS
    assert limiter.offer(note(2, rank=-1), ALIKE_S) is not None
