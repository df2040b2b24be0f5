"""Multipliers that are broken in a known way: what a self-test has to see."""

from __future__ import annotations

import os

import torch
from torch import Tensor

BAD_CORE = max(os.sched_getaffinity(0))


def one_bit(a: Tensor, b: Tensor) -> Tensor:
    """One element of float32 products is wrong, on one core only."""
    found = torch.matmul(a, b)
    if a.dtype == torch.float32 and os.sched_getaffinity(0) == {BAD_CORE}:
        found[17, 4] += 1024
    return found


def nothing(a: Tensor, b: Tensor) -> Tensor:
    """All of it is zero, as gate-level studies of faulty accelerators see most often."""
    return torch.matmul(a, b) * 0


def not_a_number(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b) + float("nan")


def half_more(a: Tensor, b: Tensor) -> Tensor:
    """A fraction that is lost when the result is taken for whole numbers."""
    found = torch.matmul(a, b)
    if a.dtype == torch.float64:
        found[0, 0] += 0.25 * found[0, 0].sign()
    return found
