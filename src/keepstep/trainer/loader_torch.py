"""StepLoader: torch's DataLoader with its workers, at a position that counts what training has used.

Workers run ahead; what they have prepared and nobody has taken is no state. After a rollback the prepared batches are
thrown away and the workers begin again at the restored place.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from keepstep.trainer.data import MapStyle
from keepstep.trainer.places import Dealt
from keepstep.trainer.spent import SPENT

Key = tuple[int, int]
"""(place in the endless line, number in the data set)"""

_PR_SET_PDEATHSIG = 1


class StepLoader(Dealt):
    """Batches of this rank, prepared by worker processes; register it and call ``next`` in each step.

    Random augmentation in ``dataset[...]`` is drawn from generators of Python, NumPy and torch that are seeded anew
    for each sample by (seed, place): a sample that has to be made again is made the same, by whichever worker.

    Args:
        dataset: map-style. ``batch_size``, ``seed``, ``rank``, ``world_size``, ``shuffle``, ``passes`` and ``pad``
            mean what they mean in ``StepData``, and either can load the other's state.
        collate: as in ``DataLoader``, whose own default is used where left out.
        num_workers: as in ``DataLoader``; so are all that follow.
    """

    def __init__(
        self,
        dataset: MapStyle[Any],
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        passes: int | None = None,
        pad: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
        multiprocessing_context: Any = None,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise TypeError("an IterableDataset has no samples by number; use keepstep.StepStream for it")
        deal: dict[str, Any] = {
            "seed": seed,
            "rank": rank,
            "world_size": world_size,
            "shuffle": shuffle,
            "passes": passes,
            "pad": pad,
        }
        super().__init__(len(dataset), batch_size, **deal)
        self._ahead = _Ahead(len(dataset), batch_size, **deal)
        self._begin = Begin(worker_init_fn)
        self._options: dict[str, Any] = {
            "collate_fn": collate,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "timeout": timeout,
            "multiprocessing_context": multiprocessing_context,
            "worker_init_fn": self._begin if num_workers else None,
        }
        self._seeded = _Seeded(dataset, seed)
        self._workers = num_workers
        self._loader: DataLoader[Any] = self._make()
        self._iterator: Iterator[Any] | None = None

    def _make(self) -> DataLoader[Any]:
        # Without a generator of its own the loader would draw from the process's, and training after a rollback would
        # go on with other random numbers than training without one.
        own = torch.Generator().manual_seed(self._seed & _MASK_63)
        return DataLoader(self._seeded, batch_sampler=self._ahead, generator=own, **self._options)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.ended(self.position):
            self._iterator = None  # workers that have nothing to do end; persistent ones wait for a rollback
            raise StopIteration
        try:
            # What is made in this process must leave the process's own random numbers alone.
            with kept_random() if not self._workers or self._iterator is None else contextlib.nullcontext():
                if self._iterator is None:
                    self._ahead.position = self.position
                    self._begin.on_main_thread = threading.current_thread() is threading.main_thread()
                    self._iterator = iter(self._loader)
                batch = SPENT.fetch(self._iterator.__next__)
        except BaseException:
            self.close()  # torch's iterator would go on behind the batch that failed
            raise
        self.position += self.stride
        return batch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = self.position
        super().load_state_dict(state)
        if self.position != before:
            # The last reference: torch's iterator ends its workers when it goes. Persistent ones are the loader's,
            # which empties their queues when it is iterated again.
            self._iterator = None

    def close(self) -> None:
        """End the workers, persistent ones too; the next ``next`` starts them at the present position."""
        self._iterator = None
        self._loader = self._make()


class _Ahead(Dealt):
    """The batch sampler: what this rank needs from its ``position`` on. Knows nothing of the loader that uses it: a
    loader that nobody uses any more must go at once, and its workers with it."""

    def __iter__(self) -> Iterator[list[Key]]:
        position = self.position
        while not self.ended(position):
            yield [(place, self.index(place)) for place in self.places(position)]
            position += self.stride


class _Seeded(Dataset[Any]):
    """The user's data set, asked by (place, number), with random generators that belong to the place."""

    def __init__(self, dataset: MapStyle[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: Key) -> Any:
        self._sow(key[0])
        return self._dataset[key[1]]

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        several = getattr(self._dataset, "__getitems__", None)
        if several is None:
            return [self[key] for key in keys]
        self._sow(keys[0][0])
        found: list[Any] = several([index for _, index in keys])
        return found

    def _sow(self, place: int) -> None:
        digest = hashlib.blake2b(f"{self._seed}/{place}".encode(), digest_size=8).digest()
        word = int.from_bytes(digest, "little")
        random.seed(word)
        torch.default_generator.manual_seed(word & _MASK_63)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(word & _MASK_32)


_MASK_63 = (1 << 63) - 1
_MASK_32 = (1 << 32) - 1


class Begin:
    """First thing in each worker process: tie its life to the trainer's, then the user's own ``worker_init_fn``.

    A trainer that is killed takes its workers along at once. They hold copies of its sockets, and other ranks learn
    that a rank is gone by its sockets.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        self.on_main_thread = False
        """The kernel ends a child with the *thread* that made it; another thread may well end before its process."""

    def __call__(self, worker: int) -> None:
        if self.on_main_thread:
            die_with_parent()
        if self._then is not None:
            self._then(worker)


def die_with_parent() -> None:
    """Be killed when the parent's thread that made this process ends, or at once where it is gone already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


@contextlib.contextmanager
def kept_random() -> Iterator[None]:
    """Random generators of Python, torch (CPU) and NumPy are afterwards as they were before."""
    numpy = sys.modules.get("numpy")
    python, torchs = random.getstate(), torch.get_rng_state()
    numpys = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torchs)
        if numpy is not None and numpys is not None:
            numpy.random.set_state(numpys)
