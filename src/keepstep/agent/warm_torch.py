"""Warm-up of the fork server: import what every trainer imports, run one tiny step, leave no trace.

What must not exist before a fork: a CUDA context, a thread, an OpenMP pool, an open process group. So everything
runs with one thread and nothing asks for a device; each child draws random numbers of its own.
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
    "keepstep.trainer.session_torch",
    "keepstep.trainer.loop_torch",
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
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def after_fork() -> None:
    """In the child: the number of threads it asked for, and luck of its own.

    A fresh interpreter seeds torch's and NumPy's generators from the kernel; forks would all share one state.
    """
    import torch

    wanted = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(wanted) if wanted.isdigit() and int(wanted) > 0 else _threads or 1)
    torch.default_generator.seed()
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed()
