"""Replay: full state and gradients lead to the very bits that were trained, or to a sentence that says why not."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.optim import Optimizer

from keepstep.checkpoint.exceptions import PayloadDamaged, TierFull
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.checkpoint.tiers.memory import MemoryTier
from keepstep.trainer.exceptions import ReplayDiffers, ReplayRefused
from keepstep.trainer.gradient_log_torch import GradientLog, forget, read_record, rebuild, record_name, records
from keepstep.trainer.replay_check_torch import self_check
from keepstep.trainer.replay_torch import differing, flat, state_sums, tensors

Make = Callable[[Iterable[Any]], Optimizer]
WAYS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
}
STEPS = 12


class Run:
    """A small training: two groups, a frozen layer, a schedule, clipping."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(37, 65), nn.Tanh(), nn.Linear(65, 65), nn.Linear(65, 3, bias=False))
        self.model.to(dtype)
        self.model[2].weight.requires_grad_(False)
        self.dtype = dtype
        ends = [*self.model[0].parameters(), *self.model[2].parameters()]
        self.optimizer = make([{"params": ends}, {"params": list(self.model[3].parameters()), "weight_decay": 0.0}])
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        self.named = {"opt": self.optimizer}
        self.step = 0

    def train(self, *, clip: float = 0.5) -> None:
        draw = torch.Generator().manual_seed(self.step)
        self.optimizer.zero_grad()
        self.model(torch.randn(9, 37, generator=draw).to(self.dtype)).float().square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1

    def full(self) -> dict[str, Any]:
        """What a generation would hold."""
        return {
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "optimizer": torch.load(_saved(self.optimizer.state_dict()), weights_only=True),
        }

    def put(self, full: dict[str, Any]) -> None:
        self.model.load_state_dict(full["model"])
        self.optimizer.load_state_dict(full["optimizer"])
        places = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, held in full["optimizer"]["state"].items():  # load_state_dict may have changed their dtype
            self.optimizer.state[places[index]] = dict(held)


def _saved(value: Any) -> Any:
    held = io.BytesIO()
    torch.save(value, held)
    held.seek(0)
    return held


def version(step: int, epoch: int = 1) -> Version:
    return Version(step, epoch)


def logged(run: Run, tier: Any, steps: int = STEPS) -> tuple[GradientLog, dict[str, Any]]:
    """Train a bit, keep the full state, then keep gradients only."""
    run.train()
    run.train()
    log = GradientLog(run.named, tier)
    check = log.start(version(run.step))
    assert check.exact, check.reason
    full = run.full()
    for _ in range(steps):
        run.train()
        log.commit(version(run.step), plain=b"step %d" % run.step)
    assert log.flush() == ""
    log.close()
    return log, full


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_full_and_gradients_are_the_state(way: str, dtype: torch.dtype) -> None:
    """Twelve steps, by every common optimizer and each of its implementations: not one bit differs."""
    run, tier = Run(WAYS[way], dtype), MemoryTier()
    log, full = logged(run, tier)
    again = Run(WAYS[way], dtype)
    again.put(full)
    reached = rebuild(tier, again.named, version(2))
    assert reached == (version(14), STEPS, b"step 14")
    assert differing(state_sums(again.named), state_sums(run.named)) == []
    for name, tensor in tensors(run.named).items():
        assert torch.equal(flat(tensor), flat(tensors(again.named)[name])), name
    assert log.steps == STEPS
    gradient = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
    assert log.payload == STEPS * gradient


def test_from_the_first_step_on() -> None:
    """An optimizer that has no state yet is a full state, too."""
    run, tier = Run(WAYS["adamw"]), MemoryTier()
    log = GradientLog(run.named, tier)
    assert log.start(version(0)).exact
    for _ in range(3):
        run.train()
        log.commit(version(run.step))
    log.close()
    again = Run(WAYS["adamw"])
    assert rebuild(tier, again.named, version(0), upto=version(2)).version == version(2)
    assert rebuild(tier, again.named, version(2)).version == version(3)
    assert differing(state_sums(again.named), state_sums(run.named)) == []


def test_another_process_comes_to_the_same_bits(tmp_path: Path) -> None:
    """A fresh process with another number of threads replays from the directory that this one left."""
    threads = torch.get_num_threads()
    tier = DirectoryTier(tmp_path, "local")
    run = Run(WAYS["adamw-fused"])
    _, full = logged(run, tier)
    torch.save(full, tmp_path / "full")
    script = (
        "import sys, torch\nfrom pathlib import Path\nfrom tests.trainer import test_replay as t\n"
        "home = Path(sys.argv[1])\ntorch.set_num_threads(int(sys.argv[2]))\nrun = t.Run(t.WAYS['adamw-fused'])\n"
        "run.put(torch.load(home / 'full', weights_only=True))\n"
        "t.rebuild(t.DirectoryTier(home, 'local'), run.named, t.version(2))\nprint(t.state_sums(run.named))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), "1" if threads > 1 else "2"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(state_sums(run.named))


def test_skipped_steps_and_several_calls() -> None:
    """A step that no optimizer took changes nothing; two calls before one commit are two strokes in their order."""
    run, tier = Run(WAYS["adamw"]), MemoryTier()
    log = GradientLog(run.named, tier)
    log.start(version(0))
    log.commit(version(1))
    run.train()
    run.train()
    log.commit(version(2))
    log.close()
    record, payloads = read_record(tier, record_name(version(2), 0))
    assert len(record.strokes) == len(payloads) == 2
    again = Run(WAYS["adamw"])
    assert rebuild(tier, again.named, version(0)).version == version(2)
    assert differing(state_sums(again.named), state_sums(run.named)) == []


ODD = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-42, -1e-38, 3e38]
"""Gradients that real runs have on bad days."""


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_any_history_is_replayed(data: st.DataObject) -> None:
    """Whatever shapes, rates, missing gradients and strange numbers: the rebuilt bits are the live ones."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    shapes = data.draw(st.lists(st.sampled_from([(1,), (7,), (16, 3), (2, 3, 5), (0,), (65,)]), min_size=1, max_size=4))
    way = data.draw(st.sampled_from(sorted(WAYS.keys() - {"adam-tensor-lr", "adafactor"})))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    whole = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]

    def built() -> tuple[dict[str, Optimizer], list[Tensor]]:
        weights = [nn.Parameter(tensor.clone()) for tensor in whole]
        return {"a": WAYS[way](weights)}, list(weights)

    (named, weights), tier = built(), MemoryTier()
    log = GradientLog(named, tier)
    assert log.start(version(0)).exact
    steps = data.draw(st.integers(1, 5))
    for step in range(1, steps + 1):
        named["a"].param_groups[0]["lr"] = data.draw(st.sampled_from([0.0, 1e-5, 0.1, 3.0]))
        for weight in weights:
            weight.grad = None
            if data.draw(st.booleans()):
                weight.grad = torch.randn(weight.shape, generator=draw).to(dtype)
                if data.draw(st.booleans()) and weight.numel():
                    weight.grad.view(-1)[0] = data.draw(st.sampled_from(ODD))
        named["a"].step()
        log.commit(version(step))
    log.close()
    assert log.broken == ""
    again, _ = built()
    assert rebuild(tier, again, version(0)).version == version(steps)
    assert differing(state_sums(again), state_sums(named)) == []


# ---------------------------------------------------------------- what is refused


class Noisy(torch.optim.SGD):
    """Rounds at random, as some low-precision optimizers do."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(torch.rand_like(parameter), alpha=1e-6)


class Counting(torch.optim.SGD):
    """Keeps what decides its step where no copy of it reaches."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        Counting.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / Counting.calls
        super().step()


class Attribute(torch.optim.SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = 2.0

    def step(self, closure: Any = None) -> None:
        assert self.scale
        super().step()


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Named like torch's own."""


REFUSED: dict[str, tuple[Make, str]] = {
    "lbfgs": (lambda p: torch.optim.LBFGS(p), "through a closure"),
    "noisy": (lambda p: Noisy(p, lr=0.1), "draws random numbers"),
    "counting": (lambda p: Counting(p, lr=0.1), "differs after a trial step"),
    "attribute": (lambda p: Attribute(p, lr=0.1), "does not work on copies of its tensors"),
    "zero": (lambda p: ZeroRedundancyOptimizer(p, lr=0.1), "from other ranks"),
    "sparse": (lambda p: torch.optim.SparseAdam(p), "sparse gradients"),
    "differentiable": (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "is differentiable"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_exact_is_refused_at_the_start(what: str) -> None:
    """With a sentence that names the optimizer; nothing is kept, nothing of the live state has changed."""
    make, says = REFUSED[what]
    layer, tier = nn.Linear(5, 9), MemoryTier()
    named = {"opt": make(list(layer.parameters()))}
    before, drawn = state_sums(named), torch.random.get_rng_state()
    log = GradientLog(named, tier)
    check = log.start(version(0))
    assert not check.exact
    assert says in check.reason
    assert "'opt'" in check.reason
    assert log.broken == check.reason
    log.commit(version(1))
    assert tier.objects == {}
    assert differing(state_sums(named), before) == []
    assert torch.equal(drawn, torch.random.get_rng_state())


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    """This process as rank 0 of two, with nobody at the other end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # takes a while

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("way", "exact"), [("adamw", True), ("adamw-fused", True), ("sgd-momentum", True), ("adafactor", False)]
)
def test_pieces_need_element_wise_steps(way: str, exact: bool, two_ranks: Any) -> None:
    """Of a sharded parameter a rank sees a piece; an optimizer that looks at whole rows and columns is refused."""
    layer = nn.Linear(33, 48)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), two_ranks, [Shard(0)]))
    layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), two_ranks, [Shard(0)]))
    optimizer = WAYS[way](list(layer.parameters()))
    check = self_check({"opt": optimizer})
    assert check.exact == exact, check.reason
    assert exact or "looks at whole tensors" in check.reason


def test_sharded_state_is_replayed_on_its_piece(two_ranks: Any) -> None:
    """The local pieces of parameters, moments and gradients are kept and put back in place."""

    def built() -> tuple[Optimizer, DTensor]:
        whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        weight = nn.Parameter(distribute_tensor(whole, two_ranks, [Shard(0)]))
        return WAYS["adamw"]([weight]), weight  # type: ignore[return-value]

    optimizer, weight = built()
    tier = MemoryTier()
    log = GradientLog({"opt": optimizer}, tier)
    assert log.start(version(0)).exact
    for step in range(1, 4):
        weight.grad = DTensor.from_local(torch.full((4, 6), 0.1 * step), two_ranks, [Shard(0)])
        optimizer.step()
        log.commit(version(step))
    log.close()
    again, other = built()
    rebuild(tier, {"opt": again}, version(0))
    assert differing(state_sums({"opt": again}), state_sums({"opt": optimizer})) == []
    moment = again.state[other]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements == weight.placements


def started(way: str = "adamw") -> tuple[Run, MemoryTier, GradientLog]:
    run, tier = Run(WAYS[way]), MemoryTier()
    log = GradientLog(run.named, tier)
    assert log.start(version(0)).exact
    run.train()
    log.commit(version(1))
    assert log.flush() == ""
    return run, tier, log


def test_a_closure_ends_the_log() -> None:
    """Its gradients come after the hook: no record is made up, and training goes on."""
    run, tier, log = started()
    run.optimizer.step(lambda: 0.0)
    log.commit(version(2))
    assert "closure" in log.broken
    assert [v for v, _ in records(tier, 0)] == [version(1)]
    assert log.start(version(2)).exact  # from the next full state on
    assert log.broken == ""
    log.close()


def test_fused_scaling_ends_the_log() -> None:
    """GradScaler with a fused optimizer: the gradients are scaled, and whether the step is skipped is not known."""
    run, _, log = started("adamw-fused")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run.optimizer.zero_grad()
    scaler.scale(run.model(torch.randn(9, 37)).square().mean()).backward()
    scaler.step(run.optimizer)
    assert "GradScaler" in log.broken
    log.close()


def test_scaling_outside_the_step_is_exact() -> None:
    """Without fused, GradScaler unscales before the step, or leaves the step out: both are replayed."""
    run, tier, log = started()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, factor in ((2, 1.0), (3, float("inf")), (4, 1.0)):
        run.optimizer.zero_grad()
        scaler.scale(run.model(torch.ones(9, 37)).square().mean() * factor).backward()
        scaler.step(run.optimizer)
        scaler.update()
        log.commit(version(step))
    log.close()
    assert [len(read_record(tier, name)[0].strokes) for _, name in records(tier, 0)] == [1, 1, 0, 1]
    again = Run(WAYS["adamw"])
    rebuild(tier, again.named, version(0))
    assert differing(state_sums(again.named), state_sums(run.named)) == []


def test_weights_changed_by_others_end_the_log() -> None:
    """Clamping, averaging, loading between steps: replay cannot know of it, so it does not pretend to."""
    run, _, log = started()
    with torch.no_grad():
        run.model[0].weight.clamp_(-0.01, 0.01)
    run.train()
    assert "p/opt/0/0 changed since the last commit by something else" in log.broken
    log.close()


class FullTier(MemoryTier):
    def put(self, name: str, chunks: Any) -> int:
        raise TierFull("/disk: no room; free space")


def test_a_full_tier_ends_the_log_and_not_the_training() -> None:
    """The sentence of the tier is in ``broken``."""
    run = Run(WAYS["adamw"])
    log = GradientLog(run.named, FullTier())
    log.start(version(0))
    run.train()
    log.commit(version(1))
    assert log.flush() == "the gradients of step 1 could not be kept: /disk: no room; free space"
    run.train()
    log.commit(version(2))
    log.close()


# ---------------------------------------------------------------- rebuilding


def test_another_implementation_is_refused() -> None:
    """Kept with loops, resumed with the fused kernel: the last bits would differ."""
    run, tier = Run(WAYS["adamw"]), MemoryTier()
    logged(run, tier, 1)
    other = Run(WAYS["adamw-fused"])
    before = state_sums(other.named)
    with pytest.raises(ReplayRefused, match="the last bits would differ"):
        rebuild(tier, other.named, version(2))
    assert differing(state_sums(other.named), before) == []


def test_a_wrong_full_state_is_found() -> None:
    """One flipped bit in what replay starts from: told by the tensor's name, and nothing live has changed."""
    run, tier = Run(WAYS["adamw"]), MemoryTier()
    _, full = logged(run, tier, 3)
    again = Run(WAYS["adamw"])
    again.put(full)
    with torch.no_grad():
        again.model[3].weight.view(torch.int32)[1, 7] ^= 1
    before = state_sums(again.named)
    with pytest.raises(ReplayDiffers, match=r"step 3 .* p/opt/1/0 came out otherwise"):
        rebuild(tier, again.named, version(2))
    assert differing(state_sums(again.named), before) == []


def test_a_flipped_bit_anywhere_is_found() -> None:
    """Every byte of a record, head, description and gradients."""
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    tier = MemoryTier()
    log = GradientLog({"opt": optimizer}, tier)
    log.start(version(0))
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    log.commit(version(1))
    log.close()
    ((name, data),) = tier.objects.items()
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << (at % 8)
        tier.objects[name] = bytes(broken)
        with pytest.raises(PayloadDamaged, match=re.escape(name)):
            read_record(tier, name)
    for length in range(0, len(data), 7):
        tier.objects[name] = data[:length]
        with pytest.raises(PayloadDamaged):
            read_record(tier, name)
    tier.objects[name] = data + b"\0"
    with pytest.raises(PayloadDamaged):
        read_record(tier, name)


def test_gaps_and_other_histories() -> None:
    """A missing record ends the way; of a step that was done twice the newer epoch counts."""
    run, tier = Run(WAYS["adamw"]), MemoryTier()
    log = GradientLog(run.named, tier)
    log.start(version(0, 1))
    run.train()
    log.commit(version(1, 1))
    log.close()
    fenced = dict(tier.objects)
    run = Run(WAYS["adamw"])  # the first try of step 1 was rolled back
    log = GradientLog(run.named, tier)
    log.start(version(0, 1))
    run.train(clip=0.1)
    log.commit(version(1, 2))
    run.train()
    log.commit(version(2, 2))
    log.close()
    assert fenced.keys() < tier.objects.keys()
    again = Run(WAYS["adamw"])
    assert rebuild(tier, again.named, version(0, 1)).version == version(2, 2)
    assert differing(state_sums(again.named), state_sums(run.named)) == []
    tier.remove(record_name(version(1, 2), 0))
    with pytest.raises(ReplayRefused, match="from step 0 to step 1, not to 2"):
        rebuild(tier, Run(WAYS["adamw"]).named, version(0, 1), upto=version(2, 2))
    assert forget(tier, version(1)) == 1
    assert [v for v, _ in records(tier, 0)] == [version(2, 2)]
    assert list(records(tier, 1)) == []


def test_reading_live_tensors_makes_no_copy_of_meaning() -> None:
    """Sums tell bits apart that compare as equal numbers."""
    weight = nn.Parameter(torch.tensor([0.0, float("nan")]))
    named = {"opt": torch.optim.SGD([weight], lr=0.1)}
    before: dict[str, int] = state_sums(named)
    assert differing(state_sums(named), before) == []
    held: Tensor = weight.data
    held[0] = -0.0
    assert differing(state_sums(named), before) == ["p/opt/0/0"]
