"""Four real processes over gloo, one of them with a flipped bit: found, named, undone, and the losses are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.model.wire import WorkerAdvanced, WorkerDone, WorkerGuarded
from tests.trainer.guard.world import SCRIPT, Outcome, run
from tests.trainer.sdk.fake_agent import FakeAgent
from tests.trainer.sdk.zygote import Zygote

ON = {"mode": "on", "norms": 1, "every": 2, "window": 16, "compare_every": 4, "keep_every": 4}
TOTAL = "18"


@pytest.fixture(scope="module")
def calm(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The undisturbed run, without any guard."""
    return run(zygote, tmp_path_factory.mktemp("calm"), guard={"mode": "off"}, TOTAL=TOTAL)


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_a_flipped_bit_is_found_at_the_next_comparison_and_its_rank_named(
    zygote: Zygote, tmp_path: Path, calm: Outcome, what: str
) -> None:
    """Behind step 9 a bit of rank 2's weight, or of its Adam state, flips. Behind step 11 replicas are compared: rank
    2 is named, with tensor and element; all go back to step 8; losses and weights are those of the undisturbed run."""
    struck = run(zygote, tmp_path / "w", guard=ON, fault=f"{what}:2:9:1", TOTAL=TOTAL)
    assert struck.codes == [0] * 4
    place = "p/model/3.weight" if what == "weight" else "o/optimizer/0/2/exp_avg"
    line = next(line for line in struck.said.splitlines() if "replicas:" in line)
    assert line.startswith("keepstep: guard: step 11, rank 2")
    assert "rank 2 differs from the majority of its replicas in " in line
    assert place in line
    assert "element 5 bit" in line or what == "moment"
    assert "goes on from step 8" in struck.said
    assert struck.ranks[0]["order"] == [*range(12), *range(8, 18)]
    assert struck.losses == calm.losses
    assert [rank["weights"] for rank in struck.ranks] == [rank["weights"] for rank in calm.ranks]


def test_a_gradient_spoilt_before_the_reduction_makes_all_replicas_wrong_alike(
    zygote: Zygote, tmp_path: Path, calm: Outcome
) -> None:
    """They agree, so no comparison sees it; the norm does. The first time nobody can be named, it is undone and, as it
    was a passing fault, gone."""
    struck = run(zygote, tmp_path / "g", guard=ON, fault="gradient:1:9:1", TOTAL=TOTAL)
    assert struck.codes == [0] * 4
    assert "keepstep: guard: step 9, model/3.bias: nonfinite: not a finite number: gradients of 4 ranks" in struck.said
    assert "replicas:" not in struck.said
    assert "step 9, model/3.bias: gone: the same step came out well when it was done again" in struck.said
    assert struck.losses == calm.losses


def test_one_that_comes_back_is_traced_to_its_rank(zygote: Zygote, tmp_path: Path) -> None:
    """While the step is done again, each rank looks at its own gradients before they are reduced."""
    struck = run(zygote, tmp_path / "t", guard=ON, fault="gradient:3:9:99", TOTAL="14")
    assert struck.codes == [0] * 4
    assert "keepstep: guard: step 9, rank 3, model/3.bias: nonfinite:" in struck.said
    assert "goes on from step 8; the update of step 9 is left out" in struck.said


def test_pieces_are_compared_with_their_own_replicas(zygote: Zygote, tmp_path: Path) -> None:
    """HSDP, two by two: rank 3's piece is held by rank 1, too, and by nobody else. Two cannot outvote each other."""
    struck = run(zygote, tmp_path / "h", guard=ON, fault="weight:3:9:1", TOTAL="14", KIND="hsdp")
    assert struck.codes == [0] * 4
    assert "ranks 1, 3 differ in p/model/3.weight and there is no majority" in struck.said
    assert "step 11, p/model/3.weight: gone: the replicas agree again" in struck.said


def test_a_rank_whose_bits_flip_again_stops_the_run(zygote: Zygote, tmp_path: Path) -> None:
    """The second time it is named, training ends on all ranks with the way out."""
    struck = run(zygote, tmp_path / "s", guard=ON, fault="weight:1:9:2", TOTAL=TOTAL)
    assert struck.codes == [1] * 4
    assert "GuardStopped: step 11: rank 1 differs" in struck.said
    assert "Take the machine of rank 1 out, then start again from a durable checkpoint" in struck.said


def test_under_an_agent_a_replaced_rank_takes_part(zygote: Zygote, tmp_path: Path, calm: Outcome) -> None:
    """Level 2: rank 1 is killed and replaced in process; behind that a bit of rank 2 flips. It is found and undone in
    the new epoch, with the copy that all ranks have taken in it, told to the agent, and losses are as ever."""
    del zygote  # the agent's workers come from it, too
    words = {"ROOT": str(tmp_path), "GUARD": json.dumps(ON), "FAULT": "weight:2:13:1", "TOTAL": TOTAL, "PAUSE_AT": "6"}
    with FakeAgent(4, script=SCRIPT, **words) as agent:
        agent.start(standbys=1)
        agent.wait(lambda: len(list(tmp_path.glob("paused*"))) == 4, "all ranks to come to step 6")
        agent.kill(1)
        roster = agent.replace(1)
        (tmp_path / "go").touch()
        agent.wait_frames(WorkerAdvanced, 4, roster.epoch)
        agent.wait_frames(WorkerDone, 4, roster.epoch)
        told = [frame for _, frame in agent.frames(WorkerGuarded)]
        losses = agent.losses()
    assert [one.what for one in told] == ["kept", "replicas", "rolled_back", "gone", "judged"]
    assert (told[4].verdict, told[4].ranks, told[4].others) == ("transient", (2,), (0, 1, 3))
    assert (told[1].step, told[1].ranks, told[1].since, told[2].since) == (15, (2,), 12, 12)
    assert {rank: {str(k): v for k, v in of.items()} for rank, of in losses.items()} == dict(enumerate(calm.losses))
