"""Copier: every byte arrives, whatever the shapes and however many threads; damage is found on the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keepstep.checkpoint import sums
from keepstep.checkpoint.exceptions import SlotDamaged
from keepstep.checkpoint.slot import HEADER, Version
from keepstep.trainer import copier_torch
from keepstep.trainer.copier_torch import Copier, Job, Run, plan, runs
from keepstep.trainer.snapshots_torch import Snapshots
from keepstep.trainer.state_torch import State

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)


def tensor(size: int, dtype: torch.dtype, strided: bool) -> Tensor:
    raw = torch.randint(0, 2, (size * 2 if strided else size,), dtype=torch.int8).to(dtype)
    return raw[::2] if strided else raw


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 300_000), st.sampled_from(DTYPES), st.booleans()), min_size=0, max_size=12
    ),
    threads=st.integers(1, 3),
)
def test_a_plan_moves_every_byte_once(shapes: list[tuple[int, torch.dtype, bool]], threads: int) -> None:
    """Large, small, empty and strided tensors of any type arrive as they were, and chunks stay below their limit."""
    sources = [tensor(size, dtype, strided) for size, dtype, strided in shapes]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    found, odd = runs(targets, sources)
    assert len(found) + len(odd) == sum(1 for source in sources if source.nbytes)
    Copier(threads).run(plan(found, odd), copier_torch.ALONE + 1)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_a_large_run_is_cut_and_small_ones_are_put_together() -> None:
    """One thread never takes more than a chunk, and a thousand small tensors are one chunk."""
    size = 3 * copier_torch.CHUNK + 5
    assert len(plan([Run(0, 0, size)])) == 4
    assert len(plan([Run(0, 0, 100)] * 1000)) == 1


def test_what_a_thread_meets_is_raised_where_the_job_is_waited_for() -> None:
    """And the chunks after it are not copied any more."""
    seen: list[int] = []

    def bad() -> None:
        raise OSError("no such memory")

    job = Job([lambda: seen.append(1), bad, lambda: seen.append(2)])
    with pytest.raises(OSError, match="no such memory"):
        job.wait()
    assert seen == [1]
    assert job.done


class Kept:
    """A model of several checksummed chunks and a sealed snapshot of it."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(1100, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 900))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.state = State()
        self.state.register({"model": self.model, "optimizer": self.optimizer}, None)
        self.state.bind()
        self.keep = Snapshots(directory / "snap", 0, directory / "keeper.sock")
        self.keep.save(self.state, Version(1, 1), key="k", full=True, ring=False)
        self.slot = self.keep._full.find(Version(1, 1))
        assert self.slot is not None
        self.slot.seal()
        self.expected = self.values()

    def values(self) -> dict[str, Tensor]:
        return {live.name: live.tensor.clone() for live in [*self.state.shards(), *self.state.buffers()]}

    def spoil(self) -> None:
        with torch.no_grad():
            for live in [*self.state.shards(), *self.state.buffers()]:
                live.tensor.zero_()


def test_a_sealed_version_comes_back_checked_and_equal(tmp_path: Path) -> None:
    """All chunks are compared on the way, including those across tensors and the last, short one."""
    kept = Kept(tmp_path)
    assert kept.slot is not None
    assert len(kept.slot.table()) > 2
    kept.spoil()
    kept.keep.load(kept.state, Version(1, 1), shards=True)
    found = kept.values()
    assert all(torch.equal(found[name], kept.expected[name]) for name in kept.expected)
    assert kept.state.clean


@pytest.mark.parametrize("place", ["first", "boundary", "last tensor"])
def test_a_flipped_bit_is_found_and_that_version_is_not_offered_again(tmp_path: Path, place: str) -> None:
    """Anywhere in the data: the load says so, the state does not pass for clean, and other holders are asked."""
    kept = Kept(tmp_path)
    assert kept.slot is not None
    at = {"first": HEADER, "boundary": HEADER + sums.CHUNK, "last tensor": kept.slot.data_end - 1 - 64}[place]
    kept.slot.memory[at] ^= 8
    with pytest.raises(SlotDamaged, match="do not match their checksum"):
        kept.keep.load(kept.state, Version(1, 1), shards=True)
    assert kept.keep.full() == ()


def test_a_half_copied_state_is_not_clean(tmp_path: Path) -> None:
    """Damage between the parameters is met while others are copied: nobody may take this process for a holder."""
    kept = Kept(tmp_path)
    assert kept.slot is not None
    kept.slot.memory[HEADER + 5] ^= 1
    with pytest.raises(SlotDamaged):
        kept.keep.load(kept.state, Version(1, 1), shards=True)
    assert not kept.state.clean
