"""The stand-in: reductions are the identity, this rank's own stands for all, nothing comes from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from keepstep.trainer.standin_torch import StandIn


def ones() -> torch.Tensor:
    return torch.arange(4.0)


def zeros(*shape: int) -> torch.Tensor:
    return torch.full(shape, 7.0)


OWN = [0.0, 1.0, 2.0, 3.0]
CASES: dict[str, tuple[Callable[[StandIn], Any], Any]] = {
    "allreduce": (lambda s: s.allreduce([ones()]), [OWN]),
    "reduce": (lambda s: s.reduce([ones()]), [OWN]),
    "broadcast": (lambda s: s.broadcast([ones()]), [OWN]),
    "allgather": (lambda s: s.allgather([[zeros(4), zeros(4)]], [ones()]), [[OWN, OWN]]),
    "allgather_coalesced": (
        lambda s: s.allgather_coalesced([[zeros(4)], [zeros(4)]], [ones()]),
        [[OWN], [OWN]],
    ),
    "all_gather_single": (lambda s: s.all_gather_single(zeros(8), ones()), [OWN + OWN]),
    "all_gather_single_coalesced": (lambda s: s.all_gather_single_coalesced([zeros(8)], [ones()]), [OWN + OWN]),
    "gather at the root": (lambda s: s.gather([[zeros(4), zeros(4)]], [ones()]), [[OWN, OWN]]),
    "gather elsewhere": (lambda s: s.gather([], [ones()]), []),
    "reduce_scatter": (lambda s: s.reduce_scatter([zeros(4)], [[zeros(4), ones()]]), [OWN]),
    "reduce_scatter_single": (lambda s: s.reduce_scatter_single(zeros(2), ones()), [[2.0, 3.0]]),
    "reduce_scatter_single_coalesced": (
        lambda s: s.reduce_scatter_single_coalesced([zeros(2)], [ones()]),
        [[2.0, 3.0]],
    ),
    "scatter at the root": (lambda s: s.scatter([zeros(4)], [[zeros(4), ones()]]), [OWN]),
    "scatter elsewhere": (lambda s: s.scatter([zeros(4)], []), [[0.0] * 4]),
    "alltoall": (lambda s: s.alltoall([zeros(4), zeros(4)], [zeros(4), ones()]), [[0.0] * 4, OWN]),
    "all_to_all_single": (lambda s: s.all_to_all_single(zeros(4), ones()), [[0.0, 0.0, 2.0, 3.0]]),
    "all_to_all_single with splits": (
        lambda s: s.all_to_all_single(zeros(4), ones(), [1, 3], [1, 3]),
        [[0.0, 1.0, 2.0, 3.0]],
    ),
    "send": (lambda s: s.send([ones()], 0), [OWN]),
    "recv": (lambda s: s.recv([zeros(4)], 0), [[0.0] * 4]),
    "recv_anysource": (lambda s: s.recv_anysource([zeros(4)]), [[0.0] * 4]),
    "barrier": (lambda s: s.barrier(), []),
}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else [plain(v) for v in value]


@pytest.mark.parametrize("name", CASES)
def test_each_operation_is_complete_at_once(name: str) -> None:
    """Rank 1 of 2: the work is done when it is returned, its result is this rank's own, its future holds the same."""
    operation, expected = CASES[name]
    work = operation(StandIn(1, 2))
    assert work.is_completed()
    assert work.wait()
    assert plain(work.result()) == expected
    assert plain(work.get_future().value()) == expected
