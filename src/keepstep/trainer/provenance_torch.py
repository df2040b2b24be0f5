"""Provenance: where a number that is no number came from. Looked for only when there is reason to.

Gradients are the same on all ranks once they have been reduced, so afterwards nobody can tell which rank spoilt them.
While a trace is armed each parameter's own gradient is looked at as backward makes it, before any reduction: the first
one whose norm is not finite, in the order of backward, is where it began on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keepstep.trainer import pieces_torch as pieces
from keepstep.trainer.fingerprint_torch import Hasher
from keepstep.trainer.readings_torch import LOW


class Trace:
    """Watches the gradients of these parameters while it is armed.

    Parameters whose module swaps them for others in its forward (FSDP) give no sign; then there is nothing to say.
    """

    def __init__(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        self._parameters = parameters
        self._hooks: list[Any] = []
        self._seen: list[tuple[str, Tensor]] = []
        self._hasher: Hasher | None = None
        self._prints: list[int] = []

    @property
    def armed(self) -> bool:
        return bool(self._hooks)

    def arm(self) -> None:
        if self._hooks:
            return
        for name, parameter in self._parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(self._look(name)))  # type: ignore[no-untyped-call]

    def disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._seen = [], []

    def begin(self) -> None:
        """A new step."""
        self._seen, self._prints = [], []

    def fingerprint(self, hasher: Hasher | None) -> None:
        """From now on also take the bits of each gradient, with this hasher; ``None``: no more."""
        self._hasher = hasher
        if hasher is not None:
            self.arm()

    def prints(self) -> list[int]:
        """Of this step's own gradients, in the order of backward."""
        return list(self._prints)

    def first(self) -> str:
        """The first parameter, in the order of backward, whose gradient is not finite in this step; empty for none."""
        if not self._seen:
            return ""
        flags = torch.stack([flag.cpu() for _, flag in self._seen]).tolist()
        return next((name for (name, _), good in zip(self._seen, flags, strict=True) if not good), "")

    def _look(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            here = pieces.local(gradient)
            values = here._values() if here.is_sparse else here
            if self._hasher is not None:
                self._prints += self._hasher.each([values])
            kind = torch.float32 if values.dtype in LOW else None
            self._seen.append((name, torch.isfinite(torch.linalg.vector_norm(values, dtype=kind))))

        return hook
