"""Count devices as torchrun does, in a process of its own: ``python -m keepstep.cli.devices_torch gpu``.

The launcher never imports torch; where ``--nproc-per-node`` is a word, it asks this module and reads one line: a
number, or ``!`` and a sentence.
"""

from __future__ import annotations

import os
import sys

import torch


def count(kind: str) -> int:
    """Devices of the kind: ``auto``, ``gpu``, ``cpu``, ``xpu`` or the name of a private backend.

    Raises:
        ValueError: there is none, or the word is unknown.
    """
    cpus = len(os.sched_getaffinity(0))
    if kind == "cpu":
        return cpus
    if kind == "auto":
        return torch.accelerator.device_count() if torch.accelerator.is_available() else cpus
    if kind == "gpu":
        if not torch.cuda.is_available():
            raise ValueError("CUDA is not available")
        return torch.cuda.device_count()
    if kind == "xpu":
        if not torch.xpu.is_available():
            raise ValueError("XPU is not available")
        return torch.xpu.device_count()
    if kind == torch._C._get_privateuse1_backend_name():
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            raise ValueError(f"{kind} is not available")
        return int(module.device_count())
    raise ValueError("neither a number nor auto, gpu, cpu or xpu")


if __name__ == "__main__":
    try:
        print(count(sys.argv[1]))
    except ValueError as error:
        print(f"!{error}")
