"""The other lanes of ``benchmarks.replication``: two processes over gloo, and a library's own way to copy state.

``python -m benchmarks.replication_torch LANE --rank R --port P --size-mb N --repeats K`` prints the seconds of each
repeat from rank 0, both ranks counted until both are done; ``null`` where the library is not installed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

TENSOR_MB = 64
"""A layer of 4096 x 4096 in fp32."""


def state(size_mb: int, seed: int) -> dict[str, Tensor]:
    maker = torch.Generator().manual_seed(seed)
    count = max(1, size_mb // TENSOR_MB)
    each = size_mb * 1024 * 1024 // 4 // count
    return {f"layer.{i}.weight": torch.rand(each, generator=maker) for i in range(count)}


def pgtransport(size_mb: int, rank: int, *, in_place: bool = False) -> Callable[[], None]:
    """``torch.distributed.checkpoint``'s transport as its own replication stager uses it: into fresh tensors."""
    from torch.distributed.checkpoint._pg_transport import PGTransport

    held = state(size_mb, rank)
    group = dist.group.WORLD
    assert group is not None
    transport = PGTransport(group, timedelta(seconds=300), torch.device("cpu"), (lambda: held) if in_place else None)

    def once() -> None:
        if rank == 0:
            transport.send_checkpoint([1], held)
        else:
            transport.recv_checkpoint(0)

    return once


def nvrx(size_mb: int, rank: int) -> Callable[[], None] | None:
    """NVIDIA Resiliency Extension: each rank of a clique gets the other's state, so twice the bytes move."""
    try:
        from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
        from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
    except ImportError:
        return None

    class OnCpu(BasicTensorAwareStateDict):  # type: ignore[misc]
        """The shipped class asserts CUDA tensors."""

        def __init__(self, tensors: dict[str, Tensor]) -> None:
            self.state_dict = tensors
            self._is_hollow = False

        def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
            self.state_dict = {name: tensor.clone() for name, tensor in self.state_dict.items()}

    OnCpu.__module__, OnCpu.__qualname__ = __name__, "OnCpu"
    globals()["OnCpu"] = OnCpu  # it is pickled by name
    held = state(size_mb, rank)
    strategy = CliqueReplicationStrategy(dist.group.WORLD, target_device="cpu")
    return lambda: strategy.replicate(OnCpu(dict(held)), f"id{rank}")


LANES = {"pgtransport": pgtransport, "pgtransport_in_place": partial(pgtransport, in_place=True), "nvrx": nvrx}
"""``pgtransport_in_place``: into tensors that are there already, which DCP's stager does not do."""


def main() -> None:
    ask = argparse.ArgumentParser(prog="benchmarks.replication_torch")
    ask.add_argument("lane", choices=sorted(LANES))
    ask.add_argument("--rank", type=int, required=True)
    ask.add_argument("--port", type=int, required=True)
    ask.add_argument("--size-mb", type=int, required=True)
    ask.add_argument("--repeats", type=int, required=True)
    args = ask.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{args.port}", rank=args.rank, world_size=2)
    once = LANES[args.lane](args.size_mb, args.rank)
    took: list[float] = []
    for repeat in range(args.repeats + 1 if once else 0):
        assert once is not None
        dist.barrier()
        start = time.perf_counter()
        once()
        dist.barrier()
        if repeat:  # the first one pays for connections and fresh memory
            took.append(time.perf_counter() - start)
    if args.rank == 0:
        print(json.dumps(took or None), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
