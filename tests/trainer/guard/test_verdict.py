"""What kind of fault it was, told by doing the same steps again: data, software, a passing fault, a broken machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.trainer import verdict
from keepstep.trainer.data import StepData
from keepstep.trainer.dual_torch import compare
from keepstep.trainer.guard import Guard, History, Trouble
from keepstep.trainer.quarantine_torch import FILE, Quarantine
from keepstep.trainer.steps import PlainLoop, Step
from keepstep.trainer.told import Told
from keepstep.trainer.verdict import WATCHED_STEPS, Seen, Watch
from tests.trainer.guard.test_guardian import Run, plain
from tests.trainer.guard.world import Outcome, run
from tests.trainer.sdk.zygote import Zygote

ON = {"mode": "on", "norms": 1, "every": 2, "window": 16, "compare_every": 4, "keep_every": 4}
BAD = Trouble("nonfinite", 10, "not a finite number")


def judged(told: list[Told]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(one.verdict, one.step, one.ranks) for one in told if one.what == "judged"]


# -------------------------------------------------------------------- pure


@given(
    st.integers(2, 6), st.integers(1, 12), st.data()
)  # fmt: skip
def test_the_first_bits_that_differ_name_the_rank(world: int, steps: int, data: st.DataObject) -> None:
    """One rank's loss is wrong in one step, and from the next one on everybody's: only the first counts."""
    rank, step = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, steps - 1))
    again = [{at: f"{r}.{at}" for at in range(steps)} for r in range(world)]
    first = [
        {at: loss if at < step or (at == step and r != rank) else "x" + loss for at, loss in of.items()}
        for r, of in enumerate(again)
    ]
    found = verdict.passed(BAD, first, again)
    assert (found.verdict, found.ranks) == ("transient", (rank,))
    assert found.others == tuple(r for r in range(world) if r != rank)


def test_a_wrong_sum_of_gradients_names_nobody() -> None:
    """All losses differ from one step on: some gradient of the step before was wrong, and no sum tells whose."""
    first = [{8: "a", 9: "b"}, {8: "a", 9: "c"}]
    again = [{8: "a", 9: "d"}, {8: "a", 9: "e"}]
    found = verdict.passed(BAD, first, again)
    assert (found.ranks, found.others) == ((), ())
    assert "a gradient was wrong before it was added up" in found.why
    assert "up to step 8 and others from step 9" in found.why


def test_who_was_seen_is_named_before_anything_is_compared() -> None:
    found = verdict.passed(BAD._replace(ranks=(2,)), [{}] * 4, [{}] * 4)
    assert (found.verdict, found.ranks, found.others) == ("transient", (2,), (0, 1, 3))


def test_other_input_the_second_time_accuses_nobody() -> None:
    """Data that nobody has registered goes on instead of back: other losses on all ranks are no sign of a machine."""
    first, again = [{9: "a", 10: "nan"}, {9: "b", 10: "c"}], [{9: "x", 10: "y"}, {9: "z", 10: "w"}]
    found = verdict.passed(BAD._replace(ranks=(0,)), first, again)
    assert found.ranks == ()
    assert "is the data registered?" in found.why
    same = [{9: "a", 10: "d"}, {9: "b", 10: "c"}]
    assert verdict.passed(BAD._replace(ranks=(0,)), first, same).ranks == (0,)


def test_alone_a_rank_can_only_be_itself() -> None:
    assert verdict.passed(BAD, [{9: "a"}], [{9: "b"}]).ranks == (0,)
    assert verdict.passed(BAD, [{9: "a"}], [{9: "a"}]).ranks == ()


def test_two_replicas_are_told_apart_by_doing_it_again() -> None:
    """Neither can outvote the other; the one whose bits come out again was right."""
    tie = Trouble("replicas", 11, "there is no majority")
    same = [{9: "a"}, {9: "b"}]
    found = verdict.agree_again(tie, Seen((5, 7), same), Seen((7, 7), same))
    assert (found.verdict, found.ranks, found.others) == ("transient", (0,), (1,))
    assert verdict.agree_again(tie, Seen((5, 7), same), Seen((9, 9), same)).ranks == (), "not the same bits here"
    assert verdict.agree_again(tie, Seen((5, 7), same), Seen((), same)).ranks == (), "compared at another step"


def test_a_wrong_weight_shows_in_its_own_loss_first() -> None:
    """By the time replicas are compared the sums of gradients have carried it to all of them."""
    tie = Trouble("replicas", 11, "there is no majority")
    first, again = [{9: "a", 10: "b"}, {9: "c", 10: "d"}], [{9: "a", 10: "b"}, {9: "x", 10: "y"}]
    found = verdict.agree_again(tie, Seen((5, 7), first), Seen((9, 9), again))
    assert (found.ranks, found.others) == ((1,), (0,))
    four = [*first, {9: "e"}, {9: "f"}]
    found = verdict.agree_again(tie, Seen((), four), Seen((), [*again, {9: "g"}, {9: "f"}]), tied=(2, 3))
    assert found.ranks == (2,), "only those that could not outvote each other are asked"


def test_outvoted_twice_is_hardware() -> None:
    found = verdict.differs_again(Trouble("replicas", 11, "", (1,), "p/m/w"), (1,), 4)
    assert (found.verdict, found.ranks, found.tensor, found.others) == ("hardware", (1,), "p/m/w", (0, 2, 3))


def test_a_batch_is_to_blame_when_all_is_well_without_it() -> None:
    watch = Watch(BAD._replace(ranks=(1,)))
    assert watch.well(BAD.step + WATCHED_STEPS - 1) is None
    found = watch.well(BAD.step + WATCHED_STEPS)
    assert found is not None
    assert (found.verdict, found.ranks) == ("data", (1,))


def test_the_code_is_to_blame_when_it_comes_again_without_it() -> None:
    watch = Watch(BAD)
    assert watch.bad(BAD._replace(step=10)) is None, "the very step that is left out"
    assert watch.bad(BAD._replace(step=12, kind="spike")) is None, "something else"
    assert watch.bad(BAD._replace(step=10 + WATCHED_STEPS)) is None, "too far away"
    found = watch.bad(BAD._replace(step=12))
    assert found is not None
    assert (found.verdict, found.step) == ("software", 10)


def test_where_machines_are_replaced_training_goes_on() -> None:
    """Named twice: without a controller the run stops, with one it goes back and leaves the machine to it."""
    odd = Trouble("replicas", 11, "", (1,))
    for replaceable, action in ((False, "stop"), (True, "rollback")):
        history = History(Guard(mode="on"), replaceable=replaceable)
        assert history.decide(odd, kept=8).action == "rollback"
        assert history.named_before(odd) == (1,)
        assert history.decide(odd, kept=8).action == action


# -------------------------------------------------------------------- one process


def test_a_fault_that_passes_is_transient() -> None:
    """One rank: it is its own."""
    told = Run({10: 1}, plain()).train().told
    assert judged(told) == [("transient", 10, (0,))]
    assert [one.since for one in told if one.what == "judged"] == [8]


def test_a_batch_that_always_fails_is_data_and_is_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps that are well without it: its samples are named, written beside the run, and never used again."""
    monkeypatch.setenv("KEEPSTEP_RUN_DIR", str(tmp_path))
    run = Run({10: 99}, plain()).train(40)
    assert [verdict for verdict, _, _ in judged(run.told)] == ["data"]
    bad = run.data.indices(10 * run.data.stride)
    (told,) = [one for one in run.told if one.what == "quarantined"]
    assert told.batches == (f"data: {', '.join(map(str, bad))}",)
    (line,) = (tmp_path / FILE).read_text().splitlines()
    assert json.loads(line)["samples"] == {"data": bad}
    assert run.data.left_out == frozenset(bad)


def test_nan_in_every_batch_is_software() -> None:
    """Leaving one out does not mend it."""
    run = Run(dict.fromkeys(range(10, 40), 99), plain(max_rollbacks=3))
    with pytest.raises(Exception, match="rolled back 3 times"):
        run.train(40)
    assert ("software", 10, ()) in judged(run.told)


def test_a_look_that_breaks_at_the_beginning_is_left_to_the_body() -> None:
    """What ranks exchange as a step begins may break because one is gone: the body's own collectives find that out, and
    that is recovered from. An error that has no such reason is raised."""

    class Broken:
        def begin(self, step: int) -> None:
            raise RuntimeError("connection closed by peer")

        def commit(self, step: int, loss: object) -> None: ...

    for torn in (True, False):
        loop = PlainLoop(1, 0)
        loop.torn = lambda torn=torn: torn  # type: ignore[method-assign, misc]
        step = Step(loop, 0)
        step.watcher = Broken()
        if torn:
            with step:
                step.commit()
        else:
            with pytest.raises(RuntimeError, match="closed by peer"), step:
                pass


# -------------------------------------------------------------------- samples that are left out


def used(data: StepData[int], steps: int) -> list[list[int]]:
    return [next(data) for _ in range(steps)]


def test_a_sample_that_is_left_out_never_comes_and_every_other_does() -> None:
    """Two ranks, many passes: both pass over the same steps, so they stay together."""
    ranks = [StepData(range(20), 2, seed=5, rank=rank, world_size=2, passes=40) for rank in (0, 1)]
    for data in ranks:
        data.leave_out([7])
    seen: set[int] = set()
    while True:
        batches = [next(data, None) for data in ranks]
        assert ranks[0].position == ranks[1].position
        if None in batches:
            assert batches == [None, None]
            break
        seen.update(sample for batch in batches for sample in batch or ())
    assert seen == set(range(20)) - {7}


def test_what_is_left_out_travels_with_the_position() -> None:
    """Saved, loaded, and not forgotten by going back to before it was found."""
    one: StepData[int] = StepData(range(20), 2, seed=5)
    before = one.state_dict()
    assert "left_out" not in before, "nothing changes for those who leave nothing out"
    one.leave_out([3, 4])
    other: StepData[int] = StepData(range(20), 2, seed=5)
    other.load_state_dict(one.state_dict())
    assert other.left_out == {3, 4}
    assert used(other, 6) == used(one, 6)
    one.load_state_dict(before)
    assert one.left_out == {3, 4}


def test_leaving_everything_out_is_refused() -> None:
    """Instead of looking for a step for ever."""
    data: StepData[int] = StepData(range(8), 2, seed=5)
    with pytest.raises(ValueError, match="no step of a whole pass is without one of the 8"):
        data.leave_out(range(8))


def test_a_job_that_is_started_again_reads_what_it_left_out(tmp_path: Path) -> None:
    """Also when a line of the file was torn off."""
    data: StepData[int] = StepData(range(20), 2, seed=5)
    first = Quarantine({"data": data}, 0, tmp_path)
    assert first.leave_out(3, {"data": [1, 2], "other": [5]}, "nan") == ["other"]
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"samples": {"da')
    again: StepData[int] = StepData(range(20), 2, seed=5)
    Quarantine({"data": again}, 0, tmp_path).come_together()
    assert again.left_out == {1, 2}


# -------------------------------------------------------------------- another rank does the same work


def test_the_odd_one_of_three_is_named() -> None:
    """Two witnesses agree and the suspect does not; where they do not agree either, nobody can be named."""
    bad = BAD._replace(ranks=(1,), tensor="w")
    found = compare(bad, 1, {1: 5, 2: 7, 0: 7}, bad=True).judged
    assert found is not None
    assert (found.verdict, found.ranks, found.others) == ("hardware", (1,), (2, 0))
    assert compare(bad, 1, {1: 5, 2: 5, 0: 5}, bad=True).judged is None
    undecided = compare(bad, 1, {1: 5, 2: 7, 0: 8}, bad=True)
    assert undecided.judged is None
    assert "not deterministic" in undecided.why


# -------------------------------------------------------------------- four processes


@pytest.fixture(scope="module")
def calm(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(zygote, tmp_path_factory.mktemp("calm"), guard={"mode": "off"}, TOTAL="18")


def test_a_passing_fault_is_put_down_to_its_rank(zygote: Zygote, tmp_path: Path) -> None:
    """HSDP, two by two: the replicas could not outvote each other, and doing it again names rank 3."""
    struck = run(zygote, tmp_path / "h", guard=ON, fault="weight:3:9:1", TOTAL="14", KIND="hsdp")
    assert struck.codes == [0] * 4
    assert "step 11, rank 3, p/model/3.weight: judged transient: its loss in step 10 was the first" in struck.said


def test_a_bad_sample_is_data_whoever_reads_it(zygote: Zygote, tmp_path: Path) -> None:
    """Rank 2 gets NaN from one of its samples; ranks 3 and 0 do the same work and come to the same bits. Without the
    update all is well, and the batch is named. All ranks end with the same weights."""
    struck = run(zygote, tmp_path / "d", guard=ON, fault="sample:2:9:0", TOTAL="24", KEEPSTEP_RUN_DIR=str(tmp_path))
    assert struck.codes == [0] * 4
    assert "step 9, rank 2, " in struck.said
    assert ": judged data: it came again with the same batch" in struck.said
    assert "rank 3, 0 did the same work and came to the same bits: it is not the machine" in struck.said
    data: StepData[torch.Tensor] = StepData(torch.zeros(640), 4, seed=3, rank=2, world_size=4)
    line = json.loads((tmp_path / FILE).read_text())
    assert line["samples"] == {"data": data.indices(9 * data.stride)}
    assert len({json.dumps(rank["weights"]) for rank in struck.ranks}) == 1


def test_a_rank_that_fails_whatever_it_is_given_is_hardware(zygote: Zygote, tmp_path: Path) -> None:
    """Two others do its work and come to other bits; no sample is blamed."""
    struck = run(zygote, tmp_path / "m", guard=ON, fault="nan:2:9:99", TOTAL="24", KEEPSTEP_RUN_DIR=str(tmp_path))
    assert struck.codes == [0] * 4
    assert "judged hardware: rank 3, 0 did the same work from the same state and came to other bits" in struck.said
    assert "judged data" not in struck.said
    assert not (tmp_path / FILE).exists()


def test_one_that_comes_twice_and_not_a_third_time_is_no_batch(zygote: Zygote, tmp_path: Path, calm: Outcome) -> None:
    """The same input gave it twice and then not: done once more all is well, and no update is lost."""
    struck = run(zygote, tmp_path / "c", guard=ON, fault="nan:1:9:2", TOTAL="18")
    assert struck.codes == [0] * 4
    assert "judged transient: the same input gave it twice and not the third time" in struck.said
    assert struck.losses == calm.losses


def test_the_rank_that_flips_again_is_judged_before_the_run_stops(zygote: Zygote, tmp_path: Path) -> None:
    struck = run(zygote, tmp_path / "s", guard=ON, fault="weight:1:9:2", TOTAL="14")
    assert struck.codes == [1] * 4
    assert "step 11, rank 1, p/model/3.weight: judged hardware: outvoted again" in struck.said
