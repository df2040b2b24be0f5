"""Pieces: how one tensor or one parameter's optimizer state is looked at, compared and made anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from keepstep.checkpoint.slot import TensorEntry
from keepstep.trainer.exceptions import StateMismatch, StateNotPlain


def raw(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    return raw(tensor).detach()


def places(optimizer: Optimizer) -> list[tuple[int, int, Tensor]]:
    return [(g, i, p) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])]


def states(optimizer: Optimizer) -> list[tuple[str, Tensor, dict[Any, Any]]]:
    state = optimizer.state
    return [(f"{g}/{i}", p, state[p]) for g, i, p in places(optimizer) if p in state]


def plain_values(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    found = {}
    for path, _, values in states(optimizer):
        plain = {str(key): value for key, value in values.items() if not isinstance(value, Tensor)}
        if plain:
            found[path] = plain
    return found


def hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def likeness(value: Tensor, parameter: Tensor, name: str, key: Any) -> str:
    if not isinstance(value, DTensor):
        return "plain"
    if isinstance(parameter, DTensor) and value.shape == parameter.shape and value.placements == parameter.placements:
        return "param"
    raise StateNotPlain(
        f"optimizer {name!r} keeps {key!r} as a distributed tensor of shape {tuple(value.shape)} that is laid out "
        f"otherwise than its parameter; a newcomer could not make it"
    )


def fits(value: Any, entry: TensorEntry) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, DTensor) != (entry.like == "param"):
        return False
    here = local(value)
    return tuple(here.shape) == entry.shape and str(here.dtype) == f"torch.{entry.dtype}"


def make(entry: TensorEntry, parameter: Tensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if entry.like == "param" or (tuple(parameter.shape) == entry.shape and entry.device == parameter.device.type):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.device if entry.device == parameter.device.type else torch.device(entry.device)
    return torch.empty(entry.shape, dtype=dtype, device=device)


def check(entry: TensorEntry, target: Tensor) -> None:
    if tuple(target.shape) != entry.shape or str(target.dtype) != f"torch.{entry.dtype}":
        raise StateMismatch(
            f"{entry.name}: the snapshot holds {entry.dtype} {list(entry.shape)}, this process has "
            f"{str(target.dtype).removeprefix('torch.')} {list(target.shape)}; do all ranks run the same code?"
        )
