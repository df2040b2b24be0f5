"""Readings: losses and gradient norms, taken in each step and read a step later, so that no step waits for a device.

What a device computes stays there as scalars until a look is due. Then all scalars of the steps since the last look
leave in one copy, beside the computation, and are read at the next commit, when that copy has long arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from keepstep.trainer import pieces_torch as pieces
from keepstep.trainer.exceptions import GroupsUnsupported
from keepstep.trainer.exchange_torch import everybody, keep
from keepstep.trainer.guard import Reading

LOW = (torch.float16, torch.bfloat16)
"""Kinds whose norms are taken in 32 bits: their own range ends at 65,504, or their digits do not suffice."""


class Own(NamedTuple):
    """One step on this rank. ``square`` is the squared norm of all gradients; ``bad`` names those not finite."""

    step: int
    loss: float | None
    square: float | None
    bad: tuple[str, ...]


class _Taken:
    __slots__ = ("loss", "names", "norms", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.loss: Tensor | float | None = None
        self.names: list[str] = []
        self.norms: list[Tensor] = []


class Readings:
    """This rank's readings since the last look.

    Args:
        names: of parameters, by ``id``.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names, self._norms = names, True
        self._now: _Taken | None = None
        self._taken: list[_Taken] = []

    def begin(self, step: int, *, norms: bool = True) -> None:
        """A step begins, in which gradient norms are taken or not."""
        self._now, self._norms = _Taken(step), norms

    def before_update(self, optimizer: Optimizer) -> None:
        """The gradients are what this optimizer will use. Scaled ones are left to their scaler, which has looked."""
        now = self._now
        if now is None or not self._norms or getattr(optimizer, "found_inf", None) is not None:
            return
        for names, norms in gradient_norms(optimizer, self._names):
            now.names += names
            now.norms += norms

    def commit(self, loss: Any) -> None:
        """The step is complete; ``loss`` as ``Step.commit`` takes it."""
        now, self._now = self._now, None
        if now is None:
            return
        if isinstance(loss, Tensor):
            now.loss = loss.detach().reshape(()).clone()
        elif loss is not None:
            now.loss = float(loss)
        self._taken.append(now)

    def forget(self) -> None:
        self._now = None
        self._taken.clear()

    def hand_over(self) -> Callable[[], list[Own]]:
        """What has been taken, on its way to the host; call the result to have it, where a device still works on it."""
        taken, self._taken = self._taken, []
        scalars = [value for one in taken for value in (*one.norms, *_tensor(one.loss))]
        reads = _to_host(scalars)
        return lambda: _own(taken, reads())


def gradient_norms(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[list[str], list[Tensor]]]:
    """The norm of each gradient, still on its device, with the parameter's name; by device and kind."""
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[Tensor]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            gradient = pieces.local(parameter.grad)
            if gradient.is_sparse:
                gradient = gradient._values()
            held = kinds.setdefault((gradient.device, gradient.dtype), ([], []))
            held[0].append(names.get(id(parameter), "?"))
            held[1].append(gradient)
    return [
        (found, list(torch._foreach_norm(gradients, 2, torch.float32 if kind in LOW else None)))
        for (_, kind), (found, gradients) in kinds.items()
    ]


def _tensor(loss: Tensor | float | None) -> list[Tensor]:
    return [loss] if isinstance(loss, Tensor) else []


def _to_host(scalars: Sequence[Tensor]) -> Callable[[], list[float]]:
    """Begin one copy per device and kind; the result waits for it, if it must, and gives the values in their order."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(scalars):
        places.setdefault((value.device, value.dtype), []).append(index)
    copies = []
    for (device, _), indices in places.items():
        whole = torch.stack([scalars[index] for index in indices]).to(torch.float64)
        if device.type == "cuda":
            host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            host.copy_(whole, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            copies.append((indices, host, arrived.synchronize))
        else:
            copies.append((indices, whole, _nothing))

    def read() -> list[float]:
        values = [0.0] * len(scalars)
        for indices, host, wait in copies:
            wait()
            for index, value in zip(indices, host.tolist(), strict=True):
                values[index] = value
        return values

    return read


def _nothing() -> None:
    pass


def _own(taken: Iterable[_Taken], values: Iterable[float]) -> list[Own]:
    stream = iter(values)
    found = []
    for one in taken:
        norms = [next(stream) for _ in one.norms]
        loss = next(stream) if isinstance(one.loss, Tensor) else one.loss
        bad = tuple(name for name, norm in zip(one.names, norms, strict=True) if not _finite(norm))
        found.append(Own(one.step, loss, sum(norm * norm for norm in norms) if norms else None, bad))
    return found


def _finite(value: float) -> bool:
    return value - value == 0.0


def _split(value: float | None) -> tuple[float, float, float]:
    """A value that can be added up, how many there are, and how many that are no numbers."""
    if value is None:
        return 0.0, 0.0, 0.0
    return (value, 1.0, 0.0) if _finite(value) else (0.0, 0.0, 1.0)


def over_all_ranks(own: Sequence[Own], *, replicated: bool) -> list[Reading]:
    """The same steps over all ranks. Collective: 48 bytes per step, however many ranks there are."""
    rows = torch.tensor([[*_split(one.loss), *_split(one.square)] for one in own], dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(keep(rows))
    return [
        Reading(
            one.step,
            loss / losses if losses else None,
            (square / (norms if replicated else 1)) ** 0.5 if norms else None,
            int(bad_losses),
            int(bad_norms),
        )
        for one, (loss, losses, bad_losses, square, norms, bad_norms) in zip(own, rows.tolist(), strict=True)
    ]


def require_host_sums() -> None:
    """Refuse before the run what would fail at its first look. Collective.

    Raises:
        GroupsUnsupported: the script has made a default process group that only works on a device.
    """
    try:
        everybody(True)
    except RuntimeError as error:
        raise GroupsUnsupported(
            "the default process group cannot sum numbers in host memory, which the guard needs: leave "
            'init_process_group() to keepstep.init(), or give it backend="cpu:gloo,cuda:nccl"'
        ) from error
