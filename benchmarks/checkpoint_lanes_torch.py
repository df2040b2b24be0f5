"""What ``benchmarks.checkpoint`` compares: one class per way to save the same tensors, all in one process.

``save`` is what training waits for; ``finish`` is what goes on behind its back and is not counted as waiting.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import logging
import mmap
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Tensors = dict[str, Tensor]
Left = deque[tuple[int, tuple[int, int]]]
Deal = Callable[[int, int, Left], None]
PIECE = 8 * 1024 * 1024
FLOOR_TRIES = 5
WAIT_S = 600.0


class Lane:
    """One way to save. ``hint`` says how to get it where it cannot be imported."""

    name = ""
    hint = ""

    def __init__(self, home: Path, tensors: Tensors) -> None:
        self.home, self.tensors, self.number = home / self.name, tensors, 0
        self.home.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for what goes on behind, and remove what was written."""
        for path in self.home.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def close(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)

    def next_path(self) -> Path:
        self.number += 1
        return self.home / f"step{self.number}"


class TorchSave(Lane):
    name = "torch_save"

    def save(self) -> None:
        torch.save(self.tensors, self.next_path())


class Safetensors(Lane):
    name = "safetensors"
    hint = "pip install safetensors"

    def __init__(self, home: Path, tensors: Tensors) -> None:
        super().__init__(home, tensors)
        self.write: Callable[..., None] = importlib.import_module("safetensors.torch").save_file

    def save(self) -> None:
        self.write(self.tensors, str(self.next_path()))


class Dcp(Lane):
    """torch.distributed.checkpoint, all in the call."""

    name = "dcp_sync"

    def __init__(self, home: Path, tensors: Tensors) -> None:
        super().__init__(home, tensors)
        import torch.distributed.checkpoint as dcp

        self.dcp: Any = dcp
        alone()

    def save(self) -> None:
        self.dcp.save(self.tensors, checkpoint_id=str(self.next_path()))


class DcpAsync(Dcp):
    """``async_save`` as its documentation shows it: staging in the call, writing in a thread."""

    name = "dcp_async_stall"
    response: Any = None

    def save(self) -> None:
        self.response = self.dcp.async_save(self.tensors, checkpoint_id=str(self.next_path()))

    def finish(self) -> None:
        self.response.result(WAIT_S)
        super().finish()


class DcpAsyncCached(DcpAsync):
    """The same with a stager of one's own, which keeps its buffers: the fastest that DCP has."""

    name = "dcp_async_cached_stall"

    def __init__(self, home: Path, tensors: Tensors) -> None:
        super().__init__(home, tensors)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        )

    def save(self) -> None:
        self.response = self.dcp.async_save(self.tensors, checkpoint_id=str(self.next_path()), async_stager=self.stager)

    def close(self) -> None:
        self.stager.close()
        super().close()


class NvrxLocal(Lane):
    """NVIDIA Resiliency Extension's local checkpoint, into memory-backed files."""

    name = "nvrx_local_stall"
    hint = "pip install --no-deps nvidia-resiliency-ext"

    def __init__(self, home: Path, tensors: Tensors) -> None:
        super().__init__(home, tensors)
        base = importlib.import_module("nvidia_resiliency_ext.checkpointing.local.base_state_dict")
        managers = importlib.import_module("nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager")
        alone()
        self.wrap = _host_state(base.TensorAwareStateDict)
        self.manager = managers.LocalCheckpointManager(str(self.home))

    def save(self) -> None:
        self.number += 1
        self.manager.save(self.wrap(self.tensors), self.number, is_async=False)

    def finish(self) -> None:
        pass  # it keeps the newest by itself


def _host_state(base: type) -> Callable[[Tensors], Any]:
    """Their state dictionary insists on CUDA tensors; this one is the same for tensors of the host."""

    class HostState(base):  # type: ignore[misc]
        def __init__(self, tensors: Tensors) -> None:
            self.held: Tensors | None = dict(tensors)

        def pop_tensors(self) -> list[Tensor]:
            held, self.held = list(self.tensors), None
            return held

        @property
        def tensors(self) -> Iterable[Tensor]:
            assert self.held is not None
            return self.held.values()

        @property
        def is_hollow(self) -> bool:
            return self.held is None

        def insert_tensors(self, tensor_data: Iterable[Tensor]) -> None:
            self.held = {str(number): tensor for number, tensor in enumerate(tensor_data)}

        def init_tensors(self) -> None:
            self.held = {}

        def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
            assert self.held is not None
            self.held = {name: tensor.clone() for name, tensor in self.held.items()}

        def restore_tensor_device(self, non_blocking: bool = True) -> None:
            pass

        @property
        def state_dict(self) -> Tensors | None:
            return self.held

        def to_state_dict(self) -> Tensors | None:
            return self.held

    HostState.__module__, HostState.__qualname__ = __name__, "HostState"
    globals()["HostState"] = HostState  # it is pickled by name
    return HostState


class DlroverMemory(Lane):
    """DLRover's flash checkpoint into the shared memory of its agent."""

    name = "dlrover_memory_stall"
    hint = "pip install --no-deps dlrover; pip install grpcio protobuf psutil"

    def __init__(self, home: Path, tensors: Tensors) -> None:
        super().__init__(home, tensors)
        for word, value in {
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": f"bench{os.getpid()}",
        }.items():  # fmt: skip
            os.environ.setdefault(word, value)
        logging.disable(logging.INFO)
        engine = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.full_ckpt_engine")
        storage = importlib.import_module("dlrover.python.common.storage")
        alone()
        self.engine = engine.FullCheckpointEngine(
            str(self.home), storage.PosixDiskStorage(), local_shard_num=1, global_shard_num=1, comm_backend="gloo"
        )

    def save(self) -> None:
        path = {"model_states": str(self.next_path() / "rank_0.pt")}
        if not self.engine.save_to_memory(self.number, {"model_states": self.tensors}, path):
            raise RuntimeError("dlrover skipped the save")

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self.engine._shm_handler.close()
        self.engine._shm_handler.unlink()
        if self.engine.saver_proc is not None:
            self.engine.saver_proc.terminate()
        super().close()


PEERS: Sequence[type[Lane]] = (TorchSave, Safetensors, Dcp, DcpAsync, DcpAsyncCached, NvrxLocal, DlroverMemory)


class Floor:
    """The C library's copy of all the state into warm memory, in the way that is the fastest here.

    What was fastest is found out once, by the median of a few tries; from then on one measurement is one copy, as one
    snapshot is.
    """

    def __init__(self, tensors: Tensors, threads: int) -> None:
        self.pieces = [
            (tensor.data_ptr() + at, min(PIECE, tensor.nbytes - at))
            for tensor in tensors.values()
            for at in range(0, tensor.nbytes, PIECE)
        ]
        self.bytes = sum(size for _, size in self.pieces)
        self.memory = mmap.mmap(-1, max(mmap.PAGESIZE, self.bytes))
        self.to = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.pools = {count: ThreadPoolExecutor(count) for count in sorted({1, 2, threads})}
        self._copy(1, self._part)  # touches every page
        ways = [(count, deal) for count in self.pools for deal in (self._part, self._turns)]
        took = [[self._copy(*way) for way in ways] for _ in range(FLOOR_TRIES)]
        self.way = min(zip(map(statistics.median, zip(*took, strict=True)), ways, strict=True), key=lambda one: one[0])[
            1
        ]

    def measure(self) -> float:
        return self._copy(*self.way)

    def _copy(self, threads: int, deal: Deal) -> float:
        began = time.perf_counter()
        left = deque(zip(self._offsets(), self.pieces, strict=True))
        tasks: list[Future[None]] = [
            self.pools[threads].submit(deal, number, threads, left) for number in range(threads)
        ]
        for task in tasks:
            task.result()
        return time.perf_counter() - began

    def _offsets(self) -> list[int]:
        return [0, *itertools.accumulate(size for _, size in self.pieces)][:-1]

    def _part(self, number: int, of: int, left: Left) -> None:
        """A run of neighbouring pieces, equal in bytes to everybody else's."""
        low, high = self.bytes * number // of, self.bytes * (number + 1) // of
        for at, (start, size) in tuple(left):
            if low <= at < high:
                ctypes.memmove(self.to + at, start, size)

    def _turns(self, number: int, of: int, left: Left) -> None:
        """Whoever is free takes the next piece."""
        while left:
            try:
                at, (start, size) = left.popleft()
            except IndexError:
                return
            ctypes.memmove(self.to + at, start, size)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.shutdown()


def alone() -> None:
    """A process group of one, which some of the peers insist on."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
