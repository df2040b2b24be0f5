"""Pieces: how one tensor or one parameter's optimizer state is looked at, compared and made anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from keepstep.checkpoint.slot import TensorEntry
from keepstep.trainer.exceptions import StateMismatch, StateNotPlain

_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Names under which compiling and other wrappers hold the module that the user wrote."""
Mates = tuple[tuple[int, ...], int, int]
"""Ranks that hold equal copies: what tells their group from others, this rank's place in it, and their number."""


class Live(NamedTuple):
    """One tensor of the running process.

    Attributes:
        tensor: what this rank holds of it.
        like: how a newcomer makes it.
        global_shape: of the distributed tensor that this is a piece of; empty where it is whole by itself.
        corner: where in that tensor this piece begins.
        primary: whether this rank writes it to durable tiers; of equal copies exactly one is.
        mates: the holders of equal copies of a distributed tensor's piece; ``None`` for any other tensor.
    """

    name: str
    tensor: Tensor
    like: str
    global_shape: tuple[int, ...] = ()
    corner: tuple[int, ...] = ()
    primary: bool = True
    mates: Mates | None = None


def live(name: str, tensor: Tensor, like: str) -> Live:
    """A registered tensor as it is looked at: its local piece, and where that lies in the whole."""
    here = local(tensor)
    if not isinstance(tensor, DTensor) or tensor.ndim == 0:
        return Live(name, here, like)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Live(name, here, like, tuple(tensor.shape), tuple(tensor.shape))
    shape, corner = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(shape) != tuple(here.shape):
        raise StateNotPlain(
            f"{name}: this rank holds {list(here.shape)} of a distributed tensor of {list(tensor.shape)} where its "
            f"placements {placements} say {list(shape)}; its place in the whole is not known"
        )
    place, count, along = 0, 1, []
    for dim, placement in enumerate(placements):
        if not placement.is_shard() and not isinstance(placement, Shard):
            place, count = place * mesh.size(dim) + coordinate[dim], count * mesh.size(dim)
            along.append(dim)
    group = (*mesh.mesh.flatten().tolist(), -1, *along)
    return Live(name, here, like, tuple(tensor.shape), tuple(corner), True, (group, place, count))


def spread(lives: Sequence[Live], replicated: bool, rank: int, world_size: int) -> list[Live]:
    """Choose one writer for each piece of which several ranks hold equal copies, evenly by bytes.

    Every rank comes to the same choice without asking: names and whole sizes are the same on all of them.

    Args:
        replicated: plain tensors are the same on all ranks; else each rank's are its own.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    writers: dict[str, bool] = {}
    for one in sorted(lives, key=lambda one: (-_whole_bytes(one), one.name)):
        group, place, count = one.mates or (((-2,), rank, world_size) if replicated else ((), 0, 1))
        load = loads.setdefault(group, [0] * count)
        chosen = min(range(count), key=lambda i: (load[i], i))
        load[chosen] += _whole_bytes(one)
        writers[one.name] = chosen == place
    return [one if one.primary == writers[one.name] else one._replace(primary=writers[one.name]) for one in lives]


def _whole_bytes(one: Live) -> int:
    shape = one.global_shape or tuple(one.tensor.shape)
    size = one.tensor.element_size()
    for length in shape:
        size *= length
    return size


class Names:
    """Parameters and buffers as the user's own module calls them: the same with and without DDP or ``compile``."""

    def __init__(self, module: nn.Module) -> None:
        self._ddp = {
            f"{prefix}.module".lstrip(".")
            for prefix, one in module.named_modules()
            if isinstance(one, DistributedDataParallel)
        }
        self._known: dict[str, str] = {}

    def __call__(self, key: str) -> str:
        if key not in self._known:
            parts = key.split(".")
            kept = [
                part
                for number, part in enumerate(parts)
                if part not in _WRAPPED and ".".join(parts[: number + 1]) not in self._ddp
            ]
            self._known[key] = ".".join(kept)
        return self._known[key]


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
