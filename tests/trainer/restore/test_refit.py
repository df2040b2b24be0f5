"""One process: what a generation is refused for, who writes which copy, and what new ranks draw."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep.checkpoint import archive, generation, notes, pair
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import LayoutMismatch
from keepstep.checkpoint.generation import Part
from keepstep.checkpoint.reader import Reader
from keepstep.checkpoint.slot import Slot, Version
from keepstep.checkpoint.source import Source
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.model.beat import Word
from keepstep.model.env import NOTES_SOCKET, SNAP_DIR
from keepstep.model.ids import JobId
from keepstep.model.settings import CheckpointPolicy
from keepstep.trainer import pieces_torch as pieces
from keepstep.trainer import refit_torch as refit
from keepstep.trainer.exceptions import CannotResume, StateMismatch
from keepstep.trainer.pieces_torch import Live
from keepstep.trainer.random_torch import derive_states, put_random_states, random_states
from keepstep.trainer.restore_torch import Durable
from keepstep.trainer.snapshots_torch import Snapshots
from keepstep.trainer.state_torch import State

V = Version(4, 1)


def registered(width: int = 4, *, groups: int = 1, name: str = "optimizer", steps: int = 1) -> State:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    parameters = list(model.parameters())
    cut = len(parameters) // groups
    split = [{"params": parameters[i * cut : (i + 1) * cut]} for i in range(groups)]
    optimizer = torch.optim.AdamW(split)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = State()
    state.register({"model": model, name: optimizer}, None)
    state.bind()
    return state


class Home:
    """A rank's memory and a tier, in which ``registered()`` has been saved at step 4."""

    def __init__(self, root: Path) -> None:
        self.node, self.tier = root / "node", DirectoryTier(root / "ckpt", create=True)
        (self.node / SNAP_DIR).mkdir(parents=True)
        self.config = CheckpointConfig(job=JobId("j"), policy=CheckpointPolicy(dir=str(root / "ckpt")))
        self.snapshots = Snapshots(self.node / SNAP_DIR, 0, self.node / "keeper.sock", self.config)
        self.snapshots.save(registered(), V, key="k", full=True, ring=False)
        slot = Slot(pair.look(self.node / SNAP_DIR, 0)[0][1])
        slot.seal()
        archive.write_part(self.tier, Source.of_slot(slot), job="j", rank=0, world_size=1)
        archive.complete(self.tier, V, 1)
        slot.close()
        self.snapshots.forget_all()

    def durable(self, state: State) -> Durable:
        made = Durable(self.config, state, self.node / SNAP_DIR, notes=self.snapshots.notes)
        assert made.look(0, 1) == (V,)
        return made


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_restored_rank_says_so(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """Every bit is back, one line for people, one note for the log: from where, how much, how long."""
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.bind(str(home.node / NOTES_SOCKET))
    state = registered(steps=3)
    durable = home.durable(state)
    assert durable.bring(V, 1, mine=True) is None
    home.snapshots.load(state, V, shards=True)
    for got, kept in zip(state.shards(), registered().shards(), strict=True):
        assert got.name == kept.name
        assert torch.equal(got.tensor, kept.tensor), got.name
    note = notes.read(ear.recv(1 << 16))
    assert note is not None
    assert (note.what, note.tier, note.step, note.rank) == ("restored", "remote", 4, 0)
    assert note.bytes == sum(live.tensor.nbytes for live in [*state.shards(), *state.buffers()])
    assert durable.beat.read(Word.ARRIVED) >= note.bytes  # whoever asks whether this rank still moves sees every byte
    assert durable.beat.read(Word.RESTORING) == 0
    assert "going on from step 4 (saved in" in capsys.readouterr().err
    ear.close()


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (lambda: registered(5), r"this process has float32 \[5, 3\]"),
        (lambda: registered(groups=2), "'optimizer' has 2 parameter groups here and 1 in the checkpoint"),
        (lambda: registered(name="other"), "an optimizer 'optimizer' that is not registered here"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(home: Home, state: Any, says: str) -> None:
    mine = state()
    before = [live.tensor.clone() for live in mine.shards()]
    with pytest.raises(CannotResume, match=says):
        home.durable(mine).bring(V, 1, mine=True)
    assert all(torch.equal(a, live.tensor) for a, live in zip(before, mine.shards(), strict=True))
    assert home.snapshots.full() == ()


def test_a_model_with_other_layers_is_refused(home: Home) -> None:
    part = Reader([home.tier], V).part(0)
    state = registered()
    less = State()
    less.register({"model": nn.Sequential(nn.Linear(3, 4))}, None)
    less.bind()
    with pytest.raises(StateMismatch, match=r"2 differ \(model/1.bias, model/1.weight\)"):
        refit.fit(less, {0: part}, 0, 1)
    assert refit.alone(state, part, 0, 1)
    assert not refit.alone(state, part, 0, 2)


def test_a_tensor_that_is_each_ranks_own_must_be_held_by_that_rank(home: Home) -> None:
    """Two ranks without DDP: each has a whole model of its own, and gets its own back."""
    part = generation.unseal(home.tier.get(generation.part_name(V, 0)), Part, "x")
    parts = {rank: msgspec.structs.replace(part, rank=rank, world_size=2) for rank in range(2)}
    for rank in range(2):
        found = refit.fit(registered(), parts, rank, 2)
        assert {block.rank for block in found.blocks} == {rank}
        assert found.same == ()
    other_world = refit.fit(registered(), parts, 0, 1)
    assert {(one.rank, other.rank) for one, other in other_world.same} == {(0, 1)}
    fewer = tuple(entry for entry in part.tensors if entry.name != "p/model/0.weight")
    missing = msgspec.structs.replace(parts[1], tensors=fewer)
    with pytest.raises((LayoutMismatch, StateMismatch), match=r"model/0.weight"):
        refit.fit(registered(), {0: parts[0], 1: missing}, 1, 2)


def test_wrappers_do_not_change_names() -> None:
    """DDP and ``torch.compile`` put a segment into every name; a child that the user calls ``module`` stays."""
    plain = nn.Sequential()
    plain.module = nn.Linear(2, 2)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(torch.compile(plain))  # type: ignore[arg-type]
        names = pieces.Names(wrapped)
        assert [names(key) for key, _ in wrapped.named_parameters()] == [key for key, _ in plain.named_parameters()]
    finally:
        torch.distributed.destroy_process_group()


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 9), st.randoms(use_true_random=False))
def test_each_copy_has_one_writer_and_the_load_is_even(sizes: list[int], world: int, luck: Any) -> None:
    """Replicated tensors in any order: exactly one rank writes each, and no rank more than the others by more than the
    largest one."""
    lives = [Live(f"p/m/{i}", torch.empty(size, device="meta"), "param") for i, size in enumerate(sizes)]
    load = [0] * world
    writers: dict[str, int] = {}
    for rank in range(world):
        luck.shuffle(lives)
        for live in pieces.spread(lives, True, rank, world):
            if live.primary:
                writers[live.name] = writers.get(live.name, 0) + 1
                load[rank] += live.tensor.nbytes
    assert writers == {live.name: 1 for live in lives}
    assert max(load) - min(load) <= 4 * max(sizes)


def test_a_new_rank_draws_other_numbers_and_always_the_same() -> None:
    before = random_states()
    try:
        drawn = []
        for rank in (5, 5, 6):
            put_random_states(derive_states(before, rank))
            drawn.append(torch.rand(4).tolist())
        put_random_states(before)
        drawn.append(torch.rand(4).tolist())
        assert drawn[0] == drawn[1]
        assert len({tuple(one) for one in drawn}) == 3
    finally:
        put_random_states(before)
