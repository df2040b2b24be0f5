"""What the SDK's guard says is in the story and among the evidence; what it has only done moves nothing."""

from __future__ import annotations

from keepstep.core.summary_lines import evidence_line, fact_words
from keepstep.model.facts import GuardNoted
from keepstep.model.ids import JobId, Nanos, NodeId, Rank
from tests.core.fleet import replay, running


def test_the_guards_words_are_told_and_decide_nothing() -> None:
    """Ranks and tensor come first; a replay of the log gives the same board; no record but the fact itself follows."""
    fleet = running()
    before = len(fleet.log)
    node = next(iter(fleet.job.nodes))
    fleet.say(
        NodeId(str(node)),
        GuardNoted,
        what="skipped",
        step=11,
        why="rank 2 has gradients that are not finite",
        ranks=(Rank(2),),
        tensor="p/m/w",
        since=8,
    )
    fleet.pump()
    assert [type(record).__name__ for record in fleet.log[before:]] == ["Observed"]
    assert replay(fleet.log).dump() == fleet.mind.dump()


def test_only_what_is_wrong_is_evidence() -> None:
    """That a copy is kept, or that a fault has passed, is no reason for anything."""

    def note(what: str) -> GuardNoted:
        return GuardNoted(
            job=JobId("j"), at=Nanos(0), what=what, step=11, why="because", ranks=(Rank(2), Rank(3)), tensor="p/m/w"
        )  # type: ignore[arg-type]

    assert fact_words(note("rolled_back")) == "rank 2-3, step 11: rolled back in p/m/w: because"
    told = [what for what in ("nonfinite", "spike", "replicas", "rolled_back", "skipped") if evidence_line(note(what))]
    assert told == ["nonfinite", "spike", "replicas", "rolled_back", "skipped"]
    assert [evidence_line(note(what)) for what in ("gone", "kept", "alone")] == ["", "", ""]
