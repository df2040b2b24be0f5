"""The products of ``gemm`` on real devices: one core of a processor at a time, or an accelerator, by torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from keepstep.probes.gemm import _MIX, _STEP, Case, Wrong, locate

Multiply = Callable[[Tensor, Tensor], Tensor]
DOUBLE = "KEEPSTEP_SELFTEST_MULTIPLY"
"""``module:function`` that multiplies instead of torch: rehearses what a broken machine looks like. For tests."""


class Device(NamedTuple):
    """Where products are made. ``core`` is what the process is pinned to meanwhile; ``None`` for an accelerator."""

    name: str
    torch: torch.device
    core: int | None = None


def devices() -> list[Device]:
    """Every core that this process may use, and every accelerator that it sees."""
    cores = [Device(f"core {core}", torch.device("cpu"), core) for core in sorted(os.sched_getaffinity(0))]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [*cores, *(Device(f"cuda:{index}", torch.device("cuda", index)) for index in range(count))]


def one_thread() -> None:
    """Each product on the one core that it is pinned to."""
    torch.set_num_threads(1)


def multiply() -> Multiply:
    """torch's own product, or the double that the environment names."""
    named = os.environ.get(DOUBLE, "")
    if not named:
        return torch.matmul
    module, _, function = named.partition(":")
    return cast(Multiply, getattr(importlib.import_module(module), function))


class Product:
    """One case with its entries and what must come out; made once, checked as often as there is time.

    Args:
        seed: of the entries; two seeds share none of them.
    """

    def __init__(self, case: Case, seed: int) -> None:
        assert case.exact, f"{case} can be rounded"
        self.case = case
        self._a = _entries(2 * seed, case.rows, case.inner, case.most)
        self._b = _entries(2 * seed + 1, case.inner, case.cols, case.most)
        # Sums by element-wise products of whole numbers: nothing that multiplies matrices has touched them.
        self._rows = (self._a * self._b.sum(1)).sum(1)
        self._cols = (self._a.sum(0)[:, None] * self._b).sum(0)
        kind = getattr(torch, case.kind)
        self._factors = {torch.device("cpu"): (self._a.to(kind), self._b.to(kind))}

    def run(self, device: Device, times: Multiply) -> tuple[Wrong | None, str]:
        """Multiply once; what is wrong, and the digest of the result."""
        if device.torch not in self._factors:
            a, b = self._factors[torch.device("cpu")]
            self._factors[device.torch] = a.to(device.torch), b.to(device.torch)
        found = times(*self._factors[device.torch]).cpu().to(torch.float64)
        whole = found.to(torch.int64)
        rows, cols = _off(whole.sum(1) - self._rows), _off(whole.sum(0) - self._cols)
        if not rows and not cols and not bool((whole.to(torch.float64) == found).all()):
            return Wrong(self.case, -1, -1, 0, 0, 0), ""  # no numbers at all, or fractions that cancel
        return locate(self.case, rows, cols), hashlib.blake2b(_bytes(whole), digest_size=8).hexdigest()


def _entries(seed: int, rows: int, cols: int, most: int) -> Tensor:
    """The same numbers as ``gemm.entry``: 64-bit whole numbers wrap around in torch as they do there."""
    x = (torch.arange(1, rows * cols + 1, dtype=torch.int64) * _signed(_STEP)) + _signed(seed * _MIX)
    x ^= (x >> 31) & ((1 << 33) - 1)
    x *= _signed(_MIX)
    return (((x >> 33) & ((1 << 31) - 1)) % (2 * most + 1) - most).view(rows, cols)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _off(difference: Tensor) -> dict[int, int]:
    return {int(at): int(difference[at]) for at in difference.nonzero().flatten()}


def _bytes(whole: Tensor) -> bytes:
    here = whole.contiguous()
    return ctypes.string_at(here.data_ptr(), here.nbytes)
