"""torchdata's StatefulDataLoader, where it is installed: registered as it is, rolled back under a living iterator."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from keepstep.trainer.data import Reshardable
from keepstep.trainer.exceptions import StateMismatch, StepMisused
from keepstep.trainer.follow_torch import followed
from tests.trainer.data.sources import through_a_file

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

SAMPLES, WORLD, BATCH = 24, 2, 3
WORKERS = [(0, False), (2, False), (2, True)]


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Rank:
    """What a script does: a loader, registered, and one iterator over its passes."""

    def __init__(self, rank: int, workers: tuple[int, bool]) -> None:
        count, persistent = workers
        sampler = DistributedSampler(range(SAMPLES), WORLD, rank, seed=3)  # type: ignore[arg-type]
        self.loader = stateful.StatefulDataLoader(
            range(SAMPLES), batch_size=BATCH, sampler=sampler, num_workers=count, persistent_workers=persistent
        )
        assert followed("data", self.loader) is self.loader
        self.batches = endless(self.loader)

    def take(self) -> list[int]:
        found: list[int] = next(self.batches).tolist()
        return found


@pytest.mark.parametrize("workers", WORKERS)
def test_each_sample_once_per_pass_over_recoveries(workers: tuple[int, bool]) -> None:
    """A kill at every second step: the rank that died is a new process, the other is rolled back while its iterator
    is in use. Committed steps use each sample once in each pass."""
    ranks = [Rank(rank, workers) for rank in range(WORLD)]
    saved = [through_a_file(one.loader.state_dict()) for one in ranks]
    used: list[int] = []
    for step in range(9):  # a pass has four steps
        if step % 2:
            ranks[0].take()  # a step that nobody committed
            ranks[step // 2 % 2] = Rank(step // 2 % 2, workers)
            for one, state in zip(ranks, saved, strict=True):
                one.loader.load_state_dict(state)
        used += [sample for one in ranks for sample in one.take()]
        saved = [through_a_file(one.loader.state_dict()) for one in ranks]
    assert Counter(used[: 2 * SAMPLES]) == dict.fromkeys(range(SAMPLES), 2)
    assert len(set(used[:SAMPLES])) == SAMPLES


def test_an_iterator_in_use_goes_back_with_its_loader() -> None:
    """Without that, it would go on where it was and the step after a rollback would use other samples."""
    one = Rank(0, (0, False))
    one.take()
    saved = through_a_file(one.loader.state_dict())
    want = [one.take() for _ in range(2)]
    one.loader.load_state_dict(saved)
    assert [one.take() for _ in range(2)] == want


def test_beginning_anew_draws_no_random_number() -> None:
    """Training goes on with the numbers it would have drawn without a rollback."""
    one = Rank(0, (0, False))
    one.take()
    saved = through_a_file(one.loader.state_dict())
    before = torch.get_rng_state()
    one.loader.load_state_dict(saved)
    one.take()
    assert torch.equal(torch.get_rng_state(), before)


def test_another_number_of_ranks_is_refused_with_the_way_out() -> None:
    """Its state belongs to one rank; the message names what can be dealt anew."""
    one = Rank(0, (0, False))
    assert isinstance(one.loader, Reshardable)
    assert isinstance(one.loader, DataLoader)
    assert type(one.loader).__name__ == "StatefulDataLoader"
    with pytest.raises(StateMismatch, match=r"from 2 ranks to 3\. keepstep\.StepData, StepLoader"):
        one.loader.reshard_state([one.loader.state_dict()] * 2, 0, 3)


def test_a_loader_without_a_place_is_refused_with_the_way_out() -> None:
    """torch's own DataLoader cannot be rolled back; StepLoader takes the same options."""
    with pytest.raises(StepMisused, match=r"register\(data=\.\.\.\): a DataLoader does not know its place.*StepLoader"):
        followed("data", DataLoader(range(4)))  # type: ignore[arg-type]


def test_states_of_samplers_and_data_sets_can_be_kept() -> None:
    """What data sets keep in their states: generators, deques, pairs as keys, bytes, text in arrays. No pickle."""
    import numpy

    state: dict[str, Any] = {
        "torch": torch.Generator().get_state(),
        "python": random.Random(1).getstate(),
        "numpy": numpy.random.default_rng(1).bit_generator.state,
        "buffer": deque([(1, b"a"), (2, b"b")], maxlen=5),
        "shards": {(0, "a"): 3, (1, "b"): {"offset": 7}},
        b"raw": {b"\xff": [None, True]},
        "names": numpy.array(["cat", "a dog"]),
        "days": numpy.array(["2026-01-01"], dtype="datetime64[D]"),
    }
    back = through_a_file(state)
    assert torch.equal(back.pop("torch"), state.pop("torch"))
    for key in ("names", "days"):
        mine, theirs = back.pop(key), state.pop(key)
        assert mine.dtype == theirs.dtype
        assert (mine == theirs).all()
    assert back["buffer"].maxlen == 5
    assert back == state
