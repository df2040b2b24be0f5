"""Warm-up of the fork server: import what every trainer imports, run one tiny step, leave no trace.

What must not exist before a fork: a CUDA context, a thread, an OpenMP pool, an open process group. So everything
runs with one thread, nothing asks for a device, and the random state is put back.
"""

from __future__ import annotations

import contextlib
import importlib
import os

MODULES = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.utils.data",
    "torch._dynamo",
    "keepstep.trainer.api",
)
"""Imported where they exist: a part that is missing costs warmth, not the job."""

_threads: int | None = None


def warm_up(*, train: bool = True) -> None:
    """Import torch and friends; with ``train`` also run one forward, backward and optimizer step.

    ``train`` must be off where CUDA devices are visible: the autograd engine starts a thread per device, and
    threads do not survive a fork.
    """
    global _threads
    import torch

    _threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in MODULES:
        # Any error: an optional dependency of torch may be broken in its own way, and the program may not need it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if train:
        state = torch.get_rng_state()
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.set_rng_state(state)


def after_fork() -> None:
    """In the child: the number of threads it asked for, and NumPy luck of its own."""
    import torch

    wanted = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(wanted) if wanted.isdigit() and int(wanted) > 0 else _threads or 1)
    with contextlib.suppress(ImportError):
        # A fresh interpreter seeds NumPy's global generator from the kernel; forks would all share one state.
        import numpy

        numpy.random.seed()
