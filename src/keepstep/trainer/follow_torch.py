"""Follow: iterators of a registered loader notice when the loader is put back to an earlier place.

A ``StatefulDataLoader`` that is given a state uses it for its *next* iterator. In a process that lives on, the script
still holds the one before: it would go on as if nothing had been rolled back. So a registered loader hands out
iterators that begin anew, from the loader's state, when there is a newer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from keepstep.trainer.exceptions import StateMismatch, StepMisused
from keepstep.trainer.loader_torch import kept_random


def followed(name: str, item: Any) -> Any:
    """``item`` itself, made ready to be rolled back where it is a loader."""
    if isinstance(item, (list, tuple)):
        for one in item:
            followed(name, one)
    if not isinstance(item, DataLoader) or isinstance(item, _Following):
        return item
    kind = type(item)
    if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
        raise StepMisused(
            f"register({name}=...): a {kind.__name__} does not know its place in the data, so it could not be rolled "
            f"back; use keepstep.StepLoader (the same workers and options), or torchdata's StatefulDataLoader"
        )
    item.__class__ = type(kind.__name__, (_Following, kind), {"__module__": kind.__module__})
    return item


class _Following:
    """Mixed into the class of one registered loader."""

    _keepstep_loads = 0

    def __iter__(self) -> Iterator[Any]:
        return _Follower(self, super().__iter__())  # type: ignore[misc]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)  # type: ignore[misc]
        self._keepstep_loads += 1

    def anew(self) -> Iterator[Any]:
        """The loader's own iterator from its newest state. Torch draws a seed for it, which is not part of training."""
        with kept_random():
            made: Iterator[Any] = super().__iter__()  # type: ignore[misc]
        return made

    def reshard_state(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        raise StateMismatch(
            f"data: the state of a {type(self).__name__} only means something to the rank that saved it, and this job "
            f"went on from {len(states)} ranks to {world_size}. keepstep.StepData, StepLoader, StepStream and "
            f"StepShards can change the number of ranks; or go on with {len(states)}"
        )


class _Follower:
    """One iterator of a script, over whatever the loader's newest state says."""

    def __init__(self, loader: _Following, inner: Iterator[Any]) -> None:
        self._loader, self._inner = loader, inner
        self._seen = loader._keepstep_loads

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._seen != self._loader._keepstep_loads:
            self._seen = self._loader._keepstep_loads
            self._inner = self._loader.anew()
        return next(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
