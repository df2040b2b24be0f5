"""Is replay exact here? The user's own optimizer is tried on slices of its real state before anything rests on it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from keepstep.trainer import pieces_torch as pieces
from keepstep.trainer.replay_torch import flat, tensors, twin

SLICE = 4096
"""Elements of a parameter that the self-check looks at."""
CHECKED = 64
"""Parameters of a group that the self-check looks at."""
TRIAL_STEPS = 2
"""Steps of the self-check: the second one starts from state that the first one has made."""


class Check(NamedTuple):
    """Whether replay is exact here, and the sentence that says why or why not."""

    exact: bool
    reason: str


def self_check(optimizers: Mapping[str, Optimizer]) -> Check:
    """Try the user's own optimizers on slices of their real state: is a step on the CPU the step that was made here?

    Reads the optimizers and changes nothing. On ranks of one job it has to be called on all alike.
    """
    if not optimizers:
        return Check(False, "there is no optimizer to replay")
    for name, optimizer in optimizers.items():
        if reason := refusal(name, optimizer) or _trial(name, optimizer):
            return Check(False, reason)
    names = ", ".join(f"{name!r} ({type(optimizer).__name__})" for name, optimizer in optimizers.items())
    return Check(True, f"optimizer {names}: {TRIAL_STEPS} steps on slices of the real state came out bit for bit")


def refusal(name: str, optimizer: Optimizer) -> str:
    """Why this kind of optimizer cannot be replayed, told from what it is; empty when nothing speaks against it."""
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"optimizer {name!r} ({kind}) computes gradients by itself through a closure; only one is known here"
    if kind == "ZeroRedundancyOptimizer":
        return f"optimizer {name!r} ({kind}) takes its parameters from other ranks; register the state in full instead"
    if kind == "SparseAdam":
        return f"optimizer {name!r} ({kind}) takes sparse gradients; only dense ones can be kept"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"optimizer {name!r} ({kind}) is differentiable: its step is part of a graph"
    return ""


def _trial(name: str, optimizer: Optimizer) -> str:
    kind = f"optimizer {name!r} ({type(optimizer).__name__})"
    chosen = _chosen(optimizer)
    try:
        here = _tried(optimizer, chosen, None)
        there = _tried(optimizer, chosen, "cpu")
        sharded = any(_sharded(p) for _, _, p in pieces.places(optimizer))
        other = _tried(optimizer, chosen, "cpu", disturbed=True) if sharded else None
    except Exception as error:  # whatever a stranger's optimizer raises when it is copied
        return f"{kind} does not work on copies of its tensors ({type(error).__name__}: {error}); write differences"
    if here is None or there is None:
        return f"{kind} draws random numbers in its step; the same gradient does not give the same bits"
    for key, value in here.items():
        if not torch.equal(flat(value), flat(there[key])):
            where = "the CPU rounds differently from the device" if value.device.type != "cpu" else "not reproducible"
            return f"{kind}: {key} differs after a trial step on the same gradient ({where}); write differences"
    seen = [(key, value) for key, value in (other or {}).items() if value.ndim and len(value) > 1]
    if other is not None and not seen:
        return f"{kind} could not be tried on pieces of its parameters: they are too small; write differences"
    for key, value in seen:
        if not torch.equal(flat(value[: len(value) // 2]), flat(there[key][: len(value) // 2])):
            return f"{kind} looks at whole tensors ({key}), and this rank holds pieces of them; write differences"
    return ""


def _chosen(optimizer: Optimizer) -> set[int]:
    """Parameters of a trial, spread over each group."""
    found: set[int] = set()
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        found |= {id(trained[k * len(trained) // CHECKED]) for k in range(CHECKED)} if trained else set()
    return found


def _tried(
    optimizer: Optimizer, chosen: set[int], device: str | None, *, disturbed: bool = False
) -> dict[str, Tensor] | None:
    """State after trial steps on slices, on ``device`` or where it is; ``None`` if random numbers were drawn.

    Args:
        disturbed: gradients of the second half of the rows are others.
    """

    def cut(tensor: Tensor, parameter: Tensor) -> Tensor:
        local, own = pieces.local(tensor), pieces.local(parameter)
        if id(parameter) not in chosen:
            return torch.empty(0, dtype=local.dtype, device=device or local.device)
        if local.shape == own.shape and own.ndim and _sliceable(optimizer, parameter):
            local = local[: _rows(own)]
        return local.detach().to(device or local.device, copy=True)

    made = twin(optimizer, cut)
    whole = {f"{g}/{i}": pieces.local(p) for g, i, p in pieces.places(optimizer)}
    draw = torch.Generator().manual_seed(1)
    devices = sorted({p.device.index or 0 for p in whole.values() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        before = torch.random.get_rng_state()
        for step in range(TRIAL_STEPS):
            for g, i, parameter in pieces.places(made):
                if parameter.requires_grad and parameter.numel():
                    own = whole[f"{g}/{i}"]
                    grad = _likely(own[: len(parameter)] if own.ndim else own, step, draw)
                    if disturbed and grad.ndim:
                        grad[len(grad) // 2 :] = grad[len(grad) // 2 :] * 3 + 1
                    parameter.grad = grad.to(parameter.device)
            made.step()
        if not torch.equal(before, torch.random.get_rng_state()):
            return None
    return tensors({"x": made})


def _rows(own: Tensor) -> int:
    """Rows of a slice."""
    return min(len(own), max(2, SLICE // max(1, own[:1].numel())))


def _sliceable(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Every tensor of its state has its shape or is a single number: then a slice of it is a smaller parameter."""
    own = pieces.local(parameter).shape
    held = (pieces.local(v) for v in optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor))
    return all(value.shape == own or value.numel() == 1 for value in held)


def _likely(own: Tensor, step: int, draw: torch.Generator) -> Tensor:
    """A gradient as training has them: of the weights' scale and smaller, with zeros, signs and tiny numbers."""
    made = torch.randn(own.shape, generator=draw, dtype=torch.float32)
    scale = float(own.detach().float().abs().mean()) if own.numel() else 1.0
    made *= (scale or 1.0) * 0.1 ** (step + 1)
    flat = made.view(-1)
    flat[::17] = 0.0
    flat[5::29] *= 1e-6
    flat[11::31] *= 1e-30
    return made.to(own.dtype)


def _sharded(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    return any(p.is_shard() and parameter.device_mesh.size(dim) > 1 for dim, p in enumerate(parameter.placements))
