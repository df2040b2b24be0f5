"""Replay: an optimizer's step done again, from the gradient alone, with the same bits as result. Off by default.

The gradient that an optimizer is given, after reduction and clipping, and its hyper-parameters decide the next state.
Keeping them instead of the state is exact only where the same implementation computes the same bits again: fused
kernels round differently from loops, a GPU from a CPU, one processor from another. So it is tried before it is
trusted: ``replay_check_torch.self_check`` runs the user's own optimizer on a slice of the real state, and says no with
a reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.optim import Optimizer

from keepstep.checkpoint import sums
from keepstep.checkpoint.slot import TensorEntry
from keepstep.trainer import pieces_torch as pieces
from keepstep.trainer.exceptions import ReplayRefused
from keepstep.trainer.plain_torch import decode_plain, encode_plain


class Implementation(Struct, frozen=True):
    """What has to be the same for a step to have the same bits."""

    kind: str
    torch: str
    cpu: str
    groups: tuple[tuple[bool | None, bool | None], ...]
    """``foreach`` and ``fused`` of each group."""


class Stroke(Struct, frozen=True, kw_only=True):
    """One call of an optimizer's ``step``: everything but the gradients' bytes, which ``entries`` tell apart."""

    optimizer: str
    implementation: Implementation
    hyper: bytes
    entries: tuple[TensorEntry, ...]
    payload: int


# ---------------------------------------------------------------- names and sums


def implementation(optimizer: Optimizer) -> Implementation:
    """Of a live optimizer, or of its replica."""
    kind = type(optimizer)
    return Implementation(
        f"{kind.__module__}.{kind.__qualname__}",
        str(torch.__version__),
        torch.backends.cpu.get_cpu_capability(),
        tuple((group.get("foreach"), group.get("fused")) for group in optimizer.param_groups),
    )


def tensors(optimizers: Mapping[str, Optimizer]) -> dict[str, Tensor]:
    """Parameters and optimizer state of this rank, by name."""
    found: dict[str, Tensor] = {}
    for name, optimizer in optimizers.items():
        for g, i, parameter in pieces.places(optimizer):
            found[f"p/{name}/{g}/{i}"] = pieces.local(parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"o/{name}/{g}/{i}/{key}"] = pieces.local(value)
    return found


def state_sums(optimizers: Mapping[str, Optimizer]) -> dict[str, int]:
    """A checksum of every tensor, and of the numbers that optimizers keep beside them."""
    found = {name: sums.digest(flat(tensor).numpy().data) for name, tensor in tensors(optimizers).items()}
    for name, optimizer in optimizers.items():
        for path, values in pieces.plain_values(optimizer).items():
            found[f"v/{name}/{path}"] = sums.digest(encode_plain(values, path))
    return found


def differing(found: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def flat(tensor: Tensor) -> Tensor:
    """A tensor's bytes on the CPU."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------- taking a step down


def take(name: str, optimizer: Optimizer, buffer: Callable[[int], Tensor]) -> tuple[Stroke, Tensor]:
    """Copy the gradients that ``optimizer`` is about to use; call it from a step's pre-hook, after clipping.

    Args:
        buffer: gives memory for at least so many bytes, as a tensor of bytes; it is returned beside the stroke.

    Raises:
        ReplayRefused: this step cannot be replayed; the sentence says why.
    """
    for scaled in ("grad_scale", "found_inf"):
        if getattr(optimizer, scaled, None) is not None:
            raise ReplayRefused(
                f"optimizer {name!r}: GradScaler leaves scaling to the fused step, so neither its gradients nor "
                f"whether it skips the step are known before; use fused=False, or bfloat16 without a scaler"
            )
    entries: list[TensorEntry] = []
    sources: list[Tensor] = []
    at = 0
    for g, i, parameter in pieces.places(optimizer):
        if parameter.grad is None:
            continue
        grad = pieces.local(parameter.grad)
        if grad.layout is not torch.strided:
            raise ReplayRefused(f"optimizer {name!r}: gradient {g}/{i} is sparse; only dense ones can be kept")
        dtype = str(grad.dtype).removeprefix("torch.")
        entries.append(TensorEntry(f"{g}/{i}", dtype, tuple(grad.shape), at, grad.nbytes))
        sources.append(grad)
        at += grad.nbytes
    held = buffer(at)
    for entry, grad in zip(entries, sources, strict=True):
        target = held[entry.offset : entry.offset + entry.nbytes]
        if entry.offset % grad.element_size() == 0:
            target.view(grad.dtype).view(grad.shape).copy_(grad)
        else:
            target.copy_(flat(grad))
    groups = [pieces.hyper(group) for group in optimizer.param_groups]
    stroke = Stroke(
        optimizer=name,
        implementation=implementation(optimizer),
        hyper=encode_plain(groups, f"optimizer {name!r}"),
        entries=tuple(entries),
        payload=at,
    )
    return stroke, held


class Replica:
    """The same optimizers once more, on the CPU, over copies of this rank's parameters and state."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        def whole(tensor: Tensor, _: Tensor) -> Tensor:
            return pieces.local(tensor).to("cpu", copy=True)

        self.optimizers = {name: twin(optimizer, whole) for name, optimizer in optimizers.items()}

    def apply(self, stroke: Stroke, payload: memoryview) -> None:
        """Do one step again.

        Raises:
            ReplayRefused: the step was computed by another implementation, or for other parameters.
        """
        optimizer = self.optimizers.get(stroke.optimizer)
        if optimizer is None:
            raise ReplayRefused(f"a step of optimizer {stroke.optimizer!r} was kept; register it under that name")
        groups = decode_plain(stroke.hyper)
        if len(groups) != len(optimizer.param_groups):
            raise ReplayRefused(
                f"optimizer {stroke.optimizer!r} had {len(groups)} groups when this was kept, and has "
                f"{len(optimizer.param_groups)} now"
            )
        if (here := implementation(optimizer)) != stroke.implementation:
            raise ReplayRefused(
                f"optimizer {stroke.optimizer!r}: kept with {stroke.implementation}, here it is {here}; the last bits "
                f"would differ. Resume from the full generation, or with what it was kept with"
            )
        for live, saved in zip(optimizer.param_groups, groups, strict=True):
            live.update(saved)
        parameters = {f"{g}/{i}": parameter for g, i, parameter in pieces.places(optimizer)}
        for entry in stroke.entries:
            target = parameters.get(entry.name)
            if target is None or tuple(target.shape) != entry.shape:
                raise ReplayRefused(
                    f"optimizer {stroke.optimizer!r}: a gradient of shape {list(entry.shape)} was kept for parameter "
                    f"{entry.name}, which is not of that shape here"
                )
            target.grad = _gradient(payload, entry, target)
        optimizer.step()
        for parameter in parameters.values():
            parameter.grad = None

    def put_back(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Make the live parameters and optimizer state equal to the replica's, in place."""
        with torch.no_grad():
            for name, optimizer in optimizers.items():
                mine = self.optimizers[name]
                for live_group, group in zip(optimizer.param_groups, mine.param_groups, strict=True):
                    live_group.update(copy.deepcopy(pieces.hyper(group)))
                    for live, own in zip(live_group["params"], group["params"], strict=True):
                        pieces.local(live).copy_(own)
                        if own in mine.state:
                            _put_state(optimizer.state[live], mine.state[own], live, live_group)


def _gradient(payload: memoryview, entry: TensorEntry, parameter: Tensor) -> Tensor:
    made = torch.empty_like(parameter, dtype=getattr(torch, entry.dtype), requires_grad=False)
    if entry.nbytes:
        held = bytearray(payload[entry.offset : entry.offset + entry.nbytes])
        made.copy_(torch.frombuffer(held, dtype=made.dtype).view(made.shape))
    return made


def _put_state(held: dict[Any, Any], mine: dict[Any, Any], live: Tensor, group: dict[str, Any]) -> None:
    for key in [key for key in held if key not in mine]:
        del held[key]
    for key, value in mine.items():
        if not isinstance(value, Tensor):
            held[key] = copy.deepcopy(value)
            continue
        there = held.get(key)
        if not isinstance(there, Tensor) or pieces.local(there).shape != value.shape:
            if value.shape == pieces.local(live).shape:
                there = torch.empty_like(live, dtype=value.dtype, requires_grad=False)
            else:  # torch keeps a step's number on the CPU unless a kernel has to read it
                near = group.get("capturable") or group.get("fused")
                there = torch.empty(value.shape, dtype=value.dtype, device=live.device if near else "cpu")
            held[key] = there
        pieces.local(there).copy_(value)


def twin(optimizer: Optimizer, cut: Callable[[Tensor, Tensor], Tensor]) -> Optimizer:
    """An optimizer of the same class and settings over other tensors, without the hooks of the first.

    Args:
        cut: gives the new tensor for a parameter or a tensor of its state (first), knowing the parameter (second).
    """
    memo: dict[int, Any] = {}
    for _, _, parameter in pieces.places(optimizer):
        memo[id(parameter)] = nn.Parameter(cut(parameter, parameter), requires_grad=parameter.requires_grad)
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                memo[id(value)] = cut(value, parameter)
    made: Optimizer = object.__new__(type(optimizer))
    made.__setstate__(copy.deepcopy(optimizer.__getstate__(), memo))
    return made
