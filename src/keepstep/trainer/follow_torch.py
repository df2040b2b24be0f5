"""Follow: iterators of a registered loader notice when the loader is put back to an earlier place.

A ``StatefulDataLoader`` that is given a state uses it for its *next* iterator. In a process that lives on, the script
still holds the one before: it would go on as if nothing had been rolled back. So a registered loader hands out
iterators that begin anew, from the loader's state, when there is a newer one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from keepstep.trainer.exceptions import StateMismatch, StepMisused
from keepstep.trainer.loader_torch import Begin, kept_random
from keepstep.trainer.spent import SPENT

LOADS = "_keepstep_loads"
"""Attribute of a registered loader: how often it has been given a state."""


def followed(name: str, item: Any) -> Any:
    """``item`` itself, made ready to be rolled back where it is a loader."""
    if isinstance(item, (list, tuple)):
        for one in item:
            followed(name, one)
    if not isinstance(item, DataLoader) or hasattr(item, LOADS):
        return item
    kind = type(item)
    if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
        raise StepMisused(
            f"register({name}=...): a {kind.__name__} does not know its place in the data, so it could not be rolled "
            f"back; use keepstep.StepLoader (the same workers and options), or torchdata's StatefulDataLoader"
        )
    item.__class__ = _following(kind)
    setattr(item, LOADS, 0)
    item.worker_init_fn = begin = Begin(item.worker_init_fn)
    begin.on_main_thread = threading.current_thread() is threading.main_thread()
    return item


def _following(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """A class for one loader, with one base: an object can change to a class of the same layout only."""

    class Following(kind):  # type: ignore[valid-type,misc]
        def __iter__(self) -> Iterator[Any]:
            return _Follower(self, super().__iter__(), self._anew)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            setattr(self, LOADS, getattr(self, LOADS) + 1)

        def _anew(self) -> Iterator[Any]:
            """The loader's own iterator, from its newest state."""
            with kept_random():  # torch draws a seed for it, which is no part of training
                made: Iterator[Any] = super().__iter__()
            return made

        def reshard_state(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
            raise StateMismatch(
                f"data: the state of a {kind.__name__} only means something to the rank that saved it, and this job "
                f"went on from {len(states)} ranks to {world_size}. keepstep.StepData, StepLoader, StepStream and "
                f"StepShards can change the number of ranks; or go on with {len(states)}"
            )

    Following.__name__, Following.__qualname__, Following.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Following


class _Follower:
    """One iterator of a script, over whatever the loader's newest state says."""

    def __init__(self, loader: Any, inner: Iterator[Any], anew: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._inner, self._anew = loader, inner, anew
        self._seen: int = getattr(loader, LOADS)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._seen != (loads := getattr(self._loader, LOADS)):
            self._seen, self._inner = loads, self._anew()
        return SPENT.fetch(self._inner.__next__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
