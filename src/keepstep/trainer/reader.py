"""Reader: one pass over something that can only be read in order, from a given sample on.

Where the source can say where it is (``state_dict``) and go there (``load_state_dict``) it is asked to; else the
samples before the place are read and thrown away.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from keepstep.trainer.exceptions import StateMismatch

SKIP_SAY_S = 5.0
"""Skipping that takes longer is told to the person who waits, again and again after so many seconds."""
SKIP_LOOK = 256
"""Samples between two looks at the clock while skipping."""

Mark = tuple[int, dict[str, Any]]
"""(how many samples lie before it, the source's own state there)"""


class Reader:
    """Iterates ``source`` behind its first ``start`` samples.

    Args:
        source: anything that ``iter`` takes. Its own state is that of the iterator where the iterator has one, else
            that of the source.
        start: samples before the first that is given out.
        mark: a place at or before ``start`` that the source itself can go to.
        name: of the source, in messages.
    """

    def __init__(self, source: Iterable[Any], *, start: int = 0, mark: Mark | None = None, name: str) -> None:
        self.number = start
        """Samples of this pass before the next one."""
        self._keeper: Any = None
        self._samples: Iterator[Any] = iter(source)
        if keeps_position(self._samples):
            self._keeper = self._samples
        elif keeps_position(source):
            self._keeper = source
        begin = 0  # also where the place was saved by a source that could go there and this one cannot
        if self._keeper is not None and mark is not None:
            begin = mark[0]
            self._keeper.load_state_dict(copy.deepcopy(mark[1]))
            if self._keeper is source:
                self._samples = iter(source)
        _skip(self._samples, start - begin, name)
        self.opened = copy.deepcopy(self.mark())
        """The first place of this reader that the source can go back to."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        sample = next(self._samples)
        self.number += 1
        return sample

    def mark(self) -> Mark | None:
        """Where the source is, in its own words; ``None`` for one without."""
        if self._keeper is None:
            return None
        return self.number, self._keeper.state_dict()


def keeps_position(source: object) -> bool:
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


def _skip(samples: Iterator[Any], count: int, name: str) -> None:
    if count <= 0:
        return
    with _slow():
        began = said = time.monotonic()
        for done in range(1, count + 1):
            try:
                next(samples)
            except StopIteration:
                raise StateMismatch(
                    f"data: {name} ended after {done - 1} samples where the saved position lies {count} samples on; it "
                    f"is not what it was when the position was saved"
                ) from None
            if done % SKIP_LOOK == 0 and (now := time.monotonic()) - said > SKIP_SAY_S:
                said, rate = now, done / max(now - began, 1e-9)
                print(
                    f"keepstep: data: skipping to the saved place in {name}: {done} of {count} samples, {rate:.0f} a "
                    f"second, about {(count - done) / rate:.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )


def _slow() -> AbstractContextManager[None]:
    """A rank that skips for minutes is not hung: say so to whoever watches."""
    from keepstep.trainer import api

    return api.pause("other")
