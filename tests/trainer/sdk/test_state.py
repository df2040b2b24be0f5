"""State: what is read from one set of objects and put back into another is the same, bit for bit."""

from __future__ import annotations

import random
import socket
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from keepstep.checkpoint.exceptions import SlotInvalid
from keepstep.checkpoint.slot import Version
from keepstep.trainer.data import StepData
from keepstep.trainer.exceptions import StateMismatch, StateNotPlain, StepMisused
from keepstep.trainer.plain_torch import decode_plain, encode_plain
from keepstep.trainer.snapshots_torch import Snapshots
from keepstep.trainer.state_torch import State


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def plain_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def amsgrad(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        [{"params": list(module.parameters())[:2]}, {"params": list(module.parameters())[2:], "lr": 0.3}], amsgrad=True
    )


class Run:
    """A tiny training with everything that has state."""

    def __init__(self, make: Any, module: nn.Module | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = module or net()
        self.optimizer = make(self.model)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
        self.data = StepData(inputs, 4, collate=torch.stack)
        self.state = State()
        self.state.register(
            {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "data": self.data}, None
        )
        self.state.bind()

    def step(self) -> str:
        loss = self.model(next(self.data)).pow(2).mean() * (1 + random.random())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach()).hex()


@pytest.fixture
def keep(tmp_path: Path) -> Snapshots:
    return Snapshots(tmp_path / "snap", 0, tmp_path / "keeper.sock")


@pytest.mark.parametrize("make", [adamw, momentum, plain_sgd, amsgrad])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_newcomer_goes_on_bit_for_bit(keep: Snapshots, make: Any, at: int) -> None:
    """A process that has only built its objects, with another seed, takes a version and then does the same steps."""
    run = Run(make)
    for _ in range(at):
        run.step()
    keep.save(run.state, Version(at, 1), key="k", full=True, ring=False)
    want = [run.step() for _ in range(4)]
    newcomer = Run(make, seed=99)
    keep.load(newcomer.state, Version(at, 1), shards=True)
    assert [newcomer.step() for _ in range(4)] == want


@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_survivor_rolls_back_bit_for_bit(keep: Snapshots, make: Any) -> None:
    """After two more steps, one of them half done, the same process goes back; also to before its first step, where
    the optimizer had no state at all."""
    run = Run(make)
    keep.save(run.state, Version(0, 1), key="k", full=True, ring=False)
    first = [run.step() for _ in range(3)]
    keep.save(run.state, Version(3, 1), key="k", full=True, ring=False)
    second = [run.step() for _ in range(2)]
    keep.load(run.state, Version(3, 1), shards=True)
    assert [run.step() for _ in range(2)] == second
    keep.load(run.state, Version(0, 1), shards=True)
    assert [run.step() for _ in range(3)] == first


def test_the_private_part_leaves_parameters_alone(keep: Snapshots) -> None:
    """Buffers, random state, schedule and data go back; parameters and moments stay: they are not in there."""
    run = Run(adamw)
    run.step()
    keep.save(run.state, Version(1, 1), key="k", full=False, ring=False)
    mean = run.model[1].running_mean.clone()  # type: ignore[index]
    with torch.no_grad():
        run.model(next(run.data))
    weight = run.model[0].weight.detach().clone()  # type: ignore[index]
    assert run.state.clean is False or run.state.touched
    run.state.touched = False
    assert run.state.clean
    keep.load(run.state, Version(1, 1), shards=False)
    assert torch.equal(run.model[1].running_mean, mean)  # type: ignore[index]
    assert torch.equal(run.model[0].weight, weight)  # type: ignore[index]
    assert run.data.position == 4  # samples of one batch
    with pytest.raises(SlotInvalid):
        keep.load(run.state, Version(1, 1), shards=True)


def test_an_optimizer_step_makes_the_state_unclean() -> None:
    """From the first instant of an optimizer step on, live parameters are no longer offered to others."""
    run = Run(adamw)
    assert run.state.clean
    run.step()
    assert not run.state.clean
    loose = State()
    loose.register({"model": net()}, None)
    loose.bind()
    assert not loose.clean, "parameters that no registered optimizer owns are changed by means we cannot see"


def test_replaced_tensors_are_followed(keep: Snapshots) -> None:
    """A parameter whose storage is exchanged after the start, and a re-assigned buffer, are saved as they are now."""
    run = Run(adamw)
    run.step()
    keep.save(run.state, Version(1, 1), key="k", full=True, ring=False)
    keep.save(run.state, Version(2, 1), key="k", full=True, ring=False)
    run.model[0].weight.data = torch.full_like(run.model[0].weight.data, 3.0)  # type: ignore[index]
    run.model[1].running_mean = torch.full((8,), 4.0)  # type: ignore[index]
    keep.save(run.state, Version(3, 1), key="k", full=True, ring=False)
    newcomer = Run(adamw, seed=3)
    keep.load(newcomer.state, Version(3, 1), shards=True)
    assert newcomer.model[0].weight.eq(3.0).all()  # type: ignore[index]
    assert newcomer.model[1].running_mean.eq(4.0).all()  # type: ignore[index]


def test_another_model_is_refused_by_name(keep: Snapshots) -> None:
    """A snapshot is never squeezed into a model of other shape."""
    run = Run(adamw)
    keep.save(run.state, Version(0, 1), key="k", full=True, ring=False)
    wider = Run(adamw, nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 3)))
    with pytest.raises(StateMismatch, match=r"p/model/0.weight.*\[8, 6\].*\[9, 6\]"):
        keep.load(wider.state, Version(0, 1), shards=True)
    deeper = Run(adamw, nn.Sequential(*net(), nn.Linear(3, 3)))
    with pytest.raises(StateMismatch, match=r"5\.bias"):
        keep.load(deeper.state, Version(0, 1), shards=True)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.usefixtures("alone")
def test_sharded_parameters_round_trip(keep: Snapshots, make: Any) -> None:
    """FSDP2: local shards are kept, moments come back as distributed tensors like their parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def sharded() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))  # type: ignore[return-value]

    run = Run(make, sharded())
    run.step()
    run.step()
    keep.save(run.state, Version(2, 1), key="k", full=True, ring=False)
    want = [run.step() for _ in range(3)]
    newcomer = Run(make, sharded(), seed=4)
    keep.load(newcomer.state, Version(2, 1), shards=True)
    kinds = {type(v) for s in newcomer.optimizer.state.values() for k, v in s.items() if k != "step"}
    assert kinds == {DTensor}
    assert [newcomer.step() for _ in range(3)] == want
    assert run.state.replicated is False


def test_the_keeper_is_told_and_never_waited_for(keep: Snapshots, tmp_path: Path) -> None:
    """The bell rings with rank and step; without anybody listening nothing happens."""
    run = Run(adamw)
    keep.save(run.state, Version(0, 1), key="k", full=True, ring=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.bind(str(tmp_path / "keeper.sock"))
        keep.save(run.state, Version(1, 1), key="k", full=True, ring=True)
        assert bell.recv(100) == b"0 1"
    assert not keep.replicated()


def test_a_step_waits_for_the_copy_of_a_restored_version_too(keep: Snapshots, tmp_path: Path) -> None:
    """Who takes over a version from this node's memory does not know whether another node has it: the keeper is asked
    to see to that, and until it has the next step is not safe."""
    run = Run(adamw)
    keep.save(run.state, Version(4, 1), key="k", full=True, ring=False)
    newcomer = Snapshots(tmp_path / "snap", 0, tmp_path / "keeper.sock")
    assert newcomer.replicated()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.bind(str(tmp_path / "keeper.sock"))
        newcomer.load(run.state, Version(4, 1), shards=True)
        assert bell.recv(100) == b"0 4"
    assert not newcomer.replicated()
    next(iter(keep._full.slots)).acked = 4
    assert newcomer.replicated()


# -------------------------------------------------------------------- plain values

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False)
)
keys = st.text(max_size=3) | st.integers(-5, 5)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.frozensets(st.integers(0, 9), max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(values)
def test_plain_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    """Tuples stay tuples, large integers stay exact."""
    back = decode_plain(encode_plain(value, "x"))
    assert back == value
    assert type(back) is type(value)


def test_tensors_arrays_and_counters_come_back() -> None:
    """The odd ones that schedulers and loaders keep."""
    numpy = pytest.importorskip("numpy")
    value = {
        "t": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.int16),
        "a": numpy.arange(6, dtype="i4").reshape(2, 3),
        "s": numpy.float64(0.1),
        "c": Counter({3: 2}),
        "d": torch.float16,
    }
    back = decode_plain(encode_plain(value, "x"))
    assert torch.equal(back["t"], value["t"])
    assert back["t"].dtype is torch.bfloat16
    assert back["empty"].shape == (0, 3)
    assert (back["a"] == value["a"]).all()
    assert back["s"] == numpy.float64(0.1)
    assert back["c"] == Counter({3: 2})
    assert type(back["c"]) is Counter
    assert back["d"] is torch.float16


def test_what_would_need_pickle_is_refused_by_name() -> None:
    """The message names the object, the path to the key, the type, and the way out."""

    class Sampler:
        def state_dict(self) -> dict[str, Any]:
            return {"inner": [1, {"generator": object()}]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    state = State()
    state.register({"sampler": Sampler()}, None)
    with pytest.raises(StateNotPlain, match=r"others\.sampler\.inner\[1\]\.generator is a builtins\.object"):
        state.plain()
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateNotPlain, match="deeper"):
        encode_plain(loop, "loop")


def test_registration_refuses_what_cannot_be_rolled_back() -> None:
    """No state_dict, or a name used twice: said at once, with the name."""
    state = State()
    with pytest.raises(StepMisused, match=r"data=.*list_iterator.*state_dict"):
        state.register({"data": iter([1])}, None)
    state.register({"model": [net(), net()]}, None)
    assert list(state.modules) == ["model0", "model1"]
    with pytest.raises(StepMisused, match="'model1' is registered already"):
        state.register({"model1": net()}, None)
