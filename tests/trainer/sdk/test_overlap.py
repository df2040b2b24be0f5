"""Copies that go on beside the next step: nothing changes under them, and a kill leaves the version before."""

from __future__ import annotations

import atexit
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepstep.checkpoint import pair
from keepstep.checkpoint.slot import Slot, Version
from keepstep.trainer import writer_torch
from keepstep.trainer.copier_torch import Job
from keepstep.trainer.snapshots_torch import PRIVATE, Snapshots
from keepstep.trainer.state_torch import State
from tests.trainer.sdk.fake_agent import FakeAgent
from tests.trainer.sdk.test_recovery import TOTAL, undisturbed

KILLS = 25
LIMIT_S = 20.0


class Held:
    """Copies of optimizers' tensors stop before their first chunk until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.helper_only = True

        def job(chunks: Any, intact: Any = None) -> Job:
            return Job([self._late, *chunks], intact)

        monkeypatch.setattr(writer_torch, "Job", Spy(job))

    def _late(self) -> None:
        assert self.go.wait(LIMIT_S)


class Spy:
    """Stands for the class where it is called, and is still the class where it is asked for."""

    def __init__(self, make: Callable[..., Job]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Job:
        return self._make(*args)

    def __instancecheck__(self, other: object) -> bool:
        return isinstance(other, Job)


class Two:
    """Two modules with an optimizer each, a buffer, and a parameter that nobody trains."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.register_buffer("count", torch.zeros(4))
        self.adam = torch.optim.AdamW(self.one.parameters(), lr=0.1)
        self.sgd = torch.optim.SGD(self.two.parameters(), lr=0.1, momentum=0.9)
        self.two.extra = nn.Parameter(torch.ones(3), requires_grad=False)
        self.state = State()
        self.state.register({"one": self.one, "two": self.two, "adam": self.adam, "sgd": self.sgd}, None)
        self.state.bind()
        self.keep = Snapshots(directory / "snap", 0, directory / "keeper.sock")
        self.keep.overlap_from = 0
        self.keep.watch(self.state)

    def train(self) -> None:
        loss = (self.one(torch.ones(1, 8)) + self.two(torch.ones(1, 8))).sum()
        loss.backward()
        self.adam.step()
        self.sgd.step()
        self.adam.zero_grad()
        self.sgd.zero_grad()
        self.two.count += 1

    def save(self, step: int, *, overlap: bool = True) -> None:
        self.keep.save(self.state, Version(step, 1), key="k", full=True, ring=False, overlap=overlap)

    def values(self) -> dict[str, Tensor]:
        return {live.name: live.tensor.clone() for live in [*self.state.shards(), *self.state.buffers()]}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Two]:
    two = Two(tmp_path)
    yield two
    two.keep.settle(LIMIT_S)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_an_overlapped_copy_is_the_state_of_its_commit(run: Two) -> None:
    """Training goes straight on; what comes back is bit for bit what was there at the commit."""
    run.train()
    for step in range(1, 9):
        expected = run.values()
        run.save(step)
        run.train()
        run.keep.settle()
        assert run.keep.full()[0] == Version(step, 1)
        now = run.values()
        run.keep.load(run.state, Version(step, 1), shards=True)
        assert same(run.values(), expected)
        assert not same(run.values(), now)
    run.train()


def test_an_optimizer_waits_for_its_own_tensors_only(run: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one optimizer's copy is held up, it does not change a tensor; the other one goes on as soon as its own
    are copied, and the version does not count until all are."""
    run.train()
    expected = run.values()
    held = Held(monkeypatch)
    mine = run.state.shards()
    first = next(iter(run.keep._owners(live) for live in mine if live.name.startswith("o/adam")))  # type: ignore[misc]
    assert first == {id(run.adam)}
    run.save(1)
    assert run.keep._full.versions() == ()
    assert run.keep.replicated() is False
    stepped = threading.Event()

    def go_on() -> None:
        run.train()
        stepped.set()

    thread = threading.Thread(target=go_on)
    thread.start()
    assert not stepped.wait(0.2)
    assert same(
        {k: v for k, v in run.values().items() if k[0] != "b"}, {k: v for k, v in expected.items() if k[0] != "b"}
    )
    held.go.set()
    thread.join(LIMIT_S)
    assert stepped.is_set()
    run.keep.settle()
    run.keep.load(run.state, Version(1, 1), shards=True)
    assert same(run.values(), expected)
    assert run.keep.waited_s > 0.1


def test_what_no_optimizer_owns_is_copied_before_the_commit_returns(run: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and frozen parameters may change at any time: they are in memory when ``save`` comes back."""
    run.train()
    expected = run.values()
    held = Held(monkeypatch)
    run.save(1)
    with torch.no_grad():
        run.two.extra.mul_(5)
        run.two.count.mul_(7)
    held.go.set()
    run.keep.settle()
    run.keep.load(run.state, Version(1, 1), shards=True)
    assert same(run.values(), expected)


def test_a_wrapped_model_is_copied_beside_the_step_all_the_same(tmp_path: Path) -> None:
    """``torch.compile`` and DDP give parameters longer names; which optimizer changes them does not depend on that."""
    module = torch.compile(nn.Linear(4, 4), backend="eager")
    assert [key for key, _ in module.named_parameters()] == ["_orig_mod.weight", "_orig_mod.bias"]
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    state = State()
    state.register({"model": module, "sgd": sgd}, None)
    state.bind()
    owners = writer_torch.owners_of(state)
    assert [owners(live) for live in state.shards()] == [{id(sgd)}, {id(sgd)}]


def test_a_change_under_the_copy_is_noticed(
    run: Two, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A parameter changed between commit and optimizer step spoils that version only: it is dropped, and from then on
    copies are blocking."""
    run.train()
    run.save(1, overlap=False)
    held = Held(monkeypatch)
    run.train()
    run.save(2)
    with torch.no_grad():
        run.one.weight.clamp_(-0.01, 0.01)
    held.go.set()
    run.keep.settle()
    assert run.keep.full() == (Version(1, 1),)
    assert "changed after the commit of step 2" in capsys.readouterr().err
    held.go.clear()
    run.save(3)  # would hang if it were copied beside the next step
    assert run.keep._full.versions() == (Version(3, 1), Version(1, 1))


def test_a_parameter_that_nobody_owns_makes_all_copies_blocking(tmp_path: Path) -> None:
    """Trained by means that cannot be seen: such a model is copied before the commit returns."""
    two = Two(tmp_path)
    two.state._provable = False
    two.train()
    two.save(1)
    assert two.keep._full.versions() == (Version(1, 1),)


def test_a_replica_has_its_own_part_before_the_copy_begins(run: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank killed in mid-copy finds parameters at any live replica, but its random state and buffers nowhere: they
    are complete when ``save`` comes back."""
    run.state._replicated = run.keep._replicated = True
    run.train()
    held = Held(monkeypatch)
    run.save(4)
    try:
        (found,) = pair.look(run.keep._directory, 0, PRIVATE)
        assert found[0] == Version(4, 1)
        assert pair.look(run.keep._directory, 0) == []
    finally:
        held.go.set()


def test_what_goes_wrong_beside_a_step_is_raised_by_the_next_save(run: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper thread has nobody to tell; the trainer hears of it at the next commit, and the version does not
    count."""

    def broken() -> None:
        raise OSError("the memory went away")

    monkeypatch.setattr(writer_torch, "Job", Spy(lambda chunks, intact=None: Job([broken, *chunks], intact)))
    run.train()
    run.save(1)
    run.train()
    with pytest.raises(OSError, match="went away"):
        run.save(2)
    assert run.keep.full() == ()


@pytest.mark.parametrize("later", [False, True])
def test_files_are_made_before_the_first_step(run: Two, later: bool) -> None:
    """All of a version's memory is there beforehand: the first snapshots neither grow the files nor map them anew."""
    size = 40 * 1024 * 1024
    run.keep.reserve(size, later=later)
    run.keep.settle()
    before = [(slot.memory, os.stat(slot.path).st_blocks * 512) for slot in run.keep._full.slots]
    assert all(blocks >= size for _, blocks in before)
    run.train()
    for step in range(1, 4):
        run.save(step)
        run.train()
    run.keep.settle()
    assert all(slot.memory is memory for slot, (memory, _) in zip(run.keep._full.slots, before, strict=True))


def test_a_forked_child_leaves_the_copy_alone(run: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that the script forks while a copy is under way, and that ends in good order, neither waits for it nor
    copies its own memory over the version."""
    run.train()
    expected = run.values()
    held = Held(monkeypatch)
    run.save(1)
    pid = os.fork()
    if pid == 0:
        try:
            with torch.no_grad():
                run.one.weight.zero_()
            held.go.set()
            atexit._run_exitfuncs()
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    held.go.set()
    run.keep.settle()
    run.keep.load(run.state, Version(1, 1), shards=True)
    assert same(run.values(), expected)


def train_for_ever(directory: Path, pipe: int) -> None:
    torch.set_num_threads(1)
    module = nn.Linear(512, 700)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    state = State()
    state.register({"module": module, "optimizer": optimizer}, None)
    state.bind()
    keep = Snapshots(directory, 0, directory / "keeper.sock")
    keep.overlap_from = 0
    keep.watch(state)
    step = max((version.step for version in keep.full()), default=0)
    if step:
        keep.load(state, Version(step, 1), shards=True)
    first = step + 2  # two overlapped copies are begun, so that one is complete: each life gets somewhere
    while True:
        if step == first:
            os.write(pipe, b"!")
        step += 1
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.grad = parameter - step  # SGD with rate 1 makes every element equal to the step
        optimizer.step()
        keep.save(state, Version(step, 1), key="k", full=True, ring=False, overlap=True)


def test_kill_9_in_an_overlapped_copy_leaves_a_whole_version(tmp_path: Path) -> None:
    """At any of many random instants, what counts is whole: every element of a version is of its step."""
    seed = int(time.time())
    print(f"seed {seed}")
    draw = random.Random(seed)
    last = 0
    torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()  # imports what each life would otherwise import for itself
    for _ in range(KILLS):
        ready, pipe = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                train_for_ever(tmp_path, pipe)
            finally:
                os._exit(1)
        os.close(pipe)
        assert os.read(ready, 1) == b"!", "it ended by itself"
        time.sleep(draw.uniform(0.0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        found = pair.look(tmp_path, 0)
        assert found, "both versions were lost"
        for version, path in found:
            slot = Slot(path)
            for entry in slot.describe().tensors:
                raw = torch.frombuffer(
                    bytearray(slot.memory[entry.offset : entry.offset + entry.nbytes]), dtype=torch.float32
                )
                assert bool((raw == version.step).all()), f"{entry.name} of step {version.step} is torn"
            slot.close()
        assert found[0][0].step > last
        last = found[0][0].step


@pytest.mark.parametrize(
    ("kind", "world", "at"), [("ddp", 2, "1:3:commit"), ("fsdp", 2, "1:3:opt"), ("fsdp", 2, "0:4:after")]
)
def test_losses_with_overlapped_copies_are_bitwise_equal(kind: str, world: int, at: str) -> None:
    """Replicated and sharded: a rank killed while copies go on is replaced, and no loss differs in any bit."""
    victim = int(at.split(":")[0])
    with FakeAgent(world, KIND=kind, TOTAL=str(TOTAL), DIE=at, KEEPSTEP_COPY="overlapped") as agent:
        agent.start(standbys=1)
        assert agent.wait_exit(victim) == -signal.SIGKILL
        agent.replace(victim)
        for rank in range(world):
            assert agent.wait_exit(rank) == 0, agent.errors()
        assert agent.losses() == undisturbed(kind, world)
