"""The guard at work in one process: readings, the copy, the way back, provenance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepstep.trainer.data import StepData
from keepstep.trainer.exceptions import GuardStopped
from keepstep.trainer.fingerprint_torch import Hasher
from keepstep.trainer.guard import Guard
from keepstep.trainer.guard_torch import SKIPS_IN_A_ROW, Guardian
from keepstep.trainer.kept_torch import Kept
from keepstep.trainer.provenance_torch import Trace
from keepstep.trainer.readings_torch import Readings, over_all_ranks
from keepstep.trainer.state_torch import State
from keepstep.trainer.steps import PlainLoop
from keepstep.trainer.told import Told


class Run:
    """One process that trains a small model under guard.

    Args:
        faults: steps to how often their batch is spoilt.
        spoil: what becomes of such a batch.
    """

    def __init__(self, faults: dict[int, int], settings: Guard, spoil: float = float("nan")) -> None:
        torch.manual_seed(7)
        self.faults, self.spoil, self.settings = dict(faults), spoil, settings
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
        self.data = StepData(inputs, 4, seed=3, collate=torch.stack)
        self.state = State()
        self.state.register({"model": self.model, "optimizer": self.optimizer, "data": self.data}, True)
        self.state.bind()
        self.told: list[Told] = []
        self.order: list[int] = []
        self.losses: dict[int, float] = {}
        self.epoch = 0
        self.late = False
        """Read a step later, as where a device does the work."""
        torch.manual_seed(11)

    def train(self, total: int = 24) -> Run:
        loop = PlainLoop(total, 0)
        guardian = self.guardian = Guardian(
            self.settings, self.state, rank=0, epoch=lambda: self.epoch, rewind=loop.rewind, tell=self.told.append
        )
        guardian._prepare()
        guardian._on_device = self.late
        for step in loop.run():
            step.watcher = guardian
            with step:
                self.order.append(step.index)
                self.one(step)
        return self

    def one(self, step: Any) -> None:
        x = next(self.data)
        if self.faults.get(step.index, 0) > 0:
            self.faults[step.index] -= 1
            x = x * self.spoil
        loss = (self.model(x) - x[:, :3]).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses[step.index] = float(loss.detach())
        step.commit(loss=loss)

    def said(self, *leave_out: str) -> list[tuple[str, int]]:
        return [
            (one.what, one.step)
            for one in self.told
            if one.what not in (*leave_out, "kept", "alone", "judged", "quarantined")
        ]


SETTINGS = Guard(mode="on", norms=1, every=2, window=16, compare_every=4, keep_every=4, max_rollbacks=3)


def plain(**more: Any) -> Guard:
    return Guard(**{**{name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__}, **more})


def test_a_passing_nan_leaves_no_trace() -> None:
    """Seen at the next look, undone to the copy, done again: losses and weights are bit for bit the undisturbed run's,
    dropout and data position included."""
    calm, struck = Run({}, SETTINGS).train(), Run({10: 1}, SETTINGS).train()
    assert struck.said() == [("nonfinite", 10), ("rolled_back", 10), ("gone", 10)]
    assert struck.order == [*range(12), *range(8, 24)]
    assert struck.losses == calm.losses
    for one, other in zip(struck.model.parameters(), calm.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert calm.said() == []


def test_a_batch_that_always_gives_nan_is_left_out() -> None:
    """The second time its update is left out and training comes to its end with finite weights; the report names the
    samples and the first parameter."""
    run = Run({10: 99}, SETTINGS).train()
    assert run.said() == [("nonfinite", 10), ("rolled_back", 10), ("nonfinite", 10), ("rolled_back", 10)]
    assert run.order == [*range(12), *range(8, 12), *range(8, 24)]
    assert all(bool(torch.isfinite(parameter).all()) for parameter in run.model.parameters())
    second = [one for one in run.told if one.what == "nonfinite"][1]
    used = ", ".join(map(str, run.data.indices(10 * run.data.stride)))
    assert f"samples {used} of data" in second.why
    assert (second.ranks, second.tensor) == ((0,), "model/3.bias")


def test_norms_between_those_that_are_taken_are_seen_when_steps_are_done_again() -> None:
    """A gradient is spoilt in a step whose norm nobody takes. The loss of the next one tells; done again, each step is
    measured, and the update of the right one is left out."""
    run = Run({}, plain(norms=5))
    weight = next(run.model.parameters())

    def spoilt(gradient: Tensor) -> Tensor:
        return gradient * float("inf") if run.order[-1] == 9 else gradient

    weight.register_hook(spoilt)
    run.train()
    assert run.said() == [("nonfinite", 10), ("rolled_back", 10), ("nonfinite", 9), ("rolled_back", 9)]
    assert [one.why for one in run.told if one.what == "rolled_back"][1].endswith("the update of step 9 is left out")


def test_an_update_left_out_changes_nothing_at_all() -> None:
    """With ``skip`` the gradients are looked at before the update: no weight, no moment, no step count moves."""
    run = Run({}, plain(skip=True))
    before: list[Tensor] = []
    step_of = run.one

    def one(step: Any) -> None:
        if step.index == 9:
            before.extend(t.detach().clone() for t in (*run.model.parameters(), *moments(run.optimizer)))
            run.faults[9] = 1
        step_of(step)
        if step.index == 9:
            after = [*run.model.parameters(), *moments(run.optimizer)]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    run.one = one  # type: ignore[method-assign]
    run.train()
    assert run.said() == [("skipped", 9)]
    assert run.order == list(range(24))


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for held in optimizer.state.values() for value in held.values()]


def test_updates_are_not_left_out_for_ever() -> None:
    """A model that gives NaN from some step on is no matter of one update: after a few it counts as trouble."""
    with pytest.raises(GuardStopped):
        (run := Run(dict.fromkeys(range(9, 99), 99), plain(skip=True, max_rollbacks=1))).train(60)
    assert [what for what, _ in run.said()][: SKIPS_IN_A_ROW + 1] == ["skipped"] * SKIPS_IN_A_ROW + ["nonfinite"]


def test_rollbacks_have_a_budget() -> None:
    """Another bad step each time: after ``max_rollbacks`` the run stops, with the step, the reason and the way out."""
    with pytest.raises(GuardStopped, match=r"step 14: .*rolled back 2 times already \(max_rollbacks\)\. Look at the b"):
        Run({9: 9, 14: 9}, plain(max_rollbacks=2)).train()


def test_a_spike_is_undone_where_that_is_wanted() -> None:
    """Told only by default; ``spikes='rollback'`` goes back."""
    run = Run({18: 1}, plain(spikes="rollback"), spoil=1e4).train()
    assert run.said() == [("spike", 18), ("rolled_back", 18), ("gone", 18)]
    assert run.losses == Run({}, SETTINGS).train().losses
    assert Run({18: 1}, SETTINGS, spoil=1e4).train().said() == [("spike", 18)]


def test_observing_tells_once_and_touches_nothing() -> None:
    """NaN weights give NaN for ever: one line, not one per look; no copy is kept."""
    run = Run({10: 1}, plain(mode="observe")).train()
    assert run.said() == [("nonfinite", 10)]
    assert run.order == list(range(24))
    assert not any(one.what == "kept" for one in run.told)


def test_a_new_epoch_begins_with_nothing_but_a_fresh_copy() -> None:
    """A newcomer has no copy and no past; so after a change of epoch nobody uses his, and the first step is kept."""
    run = Run({}, SETTINGS)
    step_of = run.one

    def one(step: Any) -> None:
        if step.index == 9 and run.epoch == 0:
            run.epoch = 1
            step.watcher.begin(9)
            run.faults[10] = 1
        step_of(step)

    run.one = one  # type: ignore[method-assign]
    run.train()
    assert run.said() == [("nonfinite", 10), ("rolled_back", 10), ("gone", 10)]
    assert next(one for one in run.told if one.what == "rolled_back").since == 10


def test_a_new_epoch_never_goes_back_to_a_copy_of_the_old_one() -> None:
    """Its first step is bad: others may have no such copy, so there is none."""
    run = Run({9: 1}, SETTINGS)
    step_of = run.one

    def one(step: Any) -> None:
        if step.index == 9 and run.epoch == 0:
            run.epoch = 1
            step.watcher.begin(9)
        step_of(step)

    run.one = one  # type: ignore[method-assign]
    with pytest.raises(GuardStopped, match="there is no common state to go back to"):
        run.train()


@pytest.mark.parametrize("late", [False, True])
def test_what_was_undone_is_counted_once(late: bool) -> None:
    """Windows hold each step once, in order, though some were done twice; also where readings come a step later."""
    calm, run = Run({}, SETTINGS).train(), Run({9: 1}, plain(window=64))
    run.late = late
    run.train()
    assert run.order == [*range(11 if late else 10), *range(8, 24)]
    assert run.losses == calm.losses
    held = [step for step, _ in run.guardian._windows._loss._held]
    assert held == sorted(set(held))


def test_norms_are_those_of_the_whole_gradient() -> None:
    """As torch's own clipping measures them, and each bad parameter by name; kinds of numbers may be mixed."""
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2, dtype=torch.bfloat16)})
    optimizer = torch.optim.SGD(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    readings = Readings({id(p): name for name, p in model.named_parameters()})
    readings.begin(0)
    readings.before_update(optimizer)
    readings.commit(torch.tensor([1.5]))
    readings.begin(1)
    model["a"].bias.grad[1] = float("inf")
    readings.before_update(optimizer)
    readings.commit(None)
    first, second = readings.hand_over()()
    assert first.square == pytest.approx(16 * 4.0)
    assert (first.loss, first.bad, second.loss, second.bad) == (1.5, (), None, ("a.bias",))
    over = over_all_ranks([first, second], replicated=True)
    assert (over[0].norm, over[0].bad_norms, over[1].norm, over[1].bad_norms) == (pytest.approx(8.0), 0, None, 1)
    assert readings.hand_over()() == []


def test_scaled_gradients_are_left_to_their_scaler() -> None:
    """A fused optimizer gets gradients that are still scaled; infinite ones are how the scaler finds its scale."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    model.weight.grad = torch.full_like(model.weight, float("inf"))
    readings = Readings({})
    readings.begin(0)
    readings.before_update(optimizer)
    readings.commit(1.0)
    assert [(one.square, one.bad) for one in readings.hand_over()()] == [(None, ())]


def test_a_copy_that_has_changed_is_not_put_back() -> None:
    """Memory that flips bits flips those of the copy, too."""
    run = Run({}, SETTINGS).train(3)
    kept = Kept(Hasher())
    kept.take(run.state, 3)
    weights = [parameter.detach().clone() for parameter in run.model.parameters()]
    assert kept.put_back(run.state) == 3
    kept._held["p/model/0.weight"].view(torch.int32)[0, 0] ^= 1
    with torch.no_grad():
        run.model[0].weight.zero_()
    with pytest.raises(GuardStopped, match="the copy of step 3 in this process's memory has changed"):
        kept.put_back(run.state)
    assert not torch.equal(run.model[0].weight, weights[0])


def test_a_trace_names_where_it_began() -> None:
    """Backward goes from the end to the beginning: the first bad gradient is that of the layer where it came in."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    trace = Trace(list(model.named_parameters()))
    trace.arm()
    trace.begin()
    middle = model[1](model[0](torch.ones(2, 3)))
    middle.register_hook(lambda gradient: gradient * float("inf"))
    model[2](middle).sum().backward()
    assert trace.first().startswith("1.")
    trace.begin()
    model(torch.ones(2, 3)).sum().backward()
    assert trace.first() == ""
    trace.disarm()
    model(torch.full((2, 3), float("nan"))).sum().backward()
    assert trace.first() == ""


class Torn(PlainLoop):
    """A loop that takes care of broken communication, as the one under an agent does."""

    def torn(self) -> bool:
        return True


class Deaf:
    """A guard whose look nobody answers."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def begin(self, step: int) -> None:
        pass

    def commit(self, step: int, loss: Any) -> None:
        raise self.error


def test_a_look_that_nobody_answers_loses_no_step() -> None:
    """Without snapshots a complete step that is not committed could not be had back: then it is committed, and the
    loop finds out by itself that others are gone. Elsewhere, and for what the guard itself says, the error goes on."""
    gone = RuntimeError("Connection closed by peer")
    committed = []
    for step in Torn(2, 0).run():
        step.watcher = Deaf(gone)
        with step:
            step.commit()
        committed.append(step.committed)
    assert committed == [True, True]
    for loop, error in (
        (PlainLoop(1, 0), gone),
        (Torn(1, 0), GuardStopped("enough")),
        (Torn(1, 0), ValueError("ours")),
    ):
        step = next(loop.run())
        step.watcher = Deaf(error)
        with pytest.raises(type(error)), step:
            step.commit()
