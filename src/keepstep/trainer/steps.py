"""Steps: the loop that goes round again. ``for step in ks.steps(total): with step: ... step.commit(loss=loss)``.

Here is what a user touches, and the loop for a process that no agent watches; the loop that recovers is in
``loop_torch``.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

from keepstep.model.facts import UserError
from keepstep.trainer.exceptions import GuardStopped, StepMisused, StepUndone

TRACEBACK_LINES = 40


class Owner(Protocol):
    """What a step tells the loop it belongs to."""

    def begin(self, step: Step) -> None: ...

    def commit(self, step: Step, loss: Any) -> None: ...

    def failed(self, step: Step, error: Exception) -> bool:
        """An exception leaves the step. True: a fault of communication, the loop takes care of it."""
        ...

    def interrupted(self) -> bool:
        """Whether a step may end without commit, because the epoch is over."""
        ...

    def torn(self) -> bool:
        """Whether communication has broken in a way that this loop takes care of."""
        ...


class Rewinding(Protocol):
    """A loop that can be told which step to go on from."""

    def run(self) -> Iterator[Step]: ...

    def rewind(self, step: int) -> None:
        """The state of ``step`` committed steps has been put back on all ranks."""
        ...


class Watcher(Protocol):
    """Looks at the numbers of each step (``guard_torch``)."""

    def begin(self, step: int) -> None: ...

    def commit(self, step: int, loss: Any) -> None:
        """Before the step counts. Raises ``StepUndone`` where an older state has been put back instead."""
        ...


class Step:
    """One step of training, from its first forward to its commit."""

    def __init__(self, owner: Owner, index: int) -> None:
        self.index = index
        """Number of this step, from 0; after a recovery the same number may come again."""
        self.committed = False
        self.entered = False
        self.watcher: Watcher | None = None
        self._open = False
        self._owner = owner

    def __enter__(self) -> Step:
        if self.entered:
            raise StepMisused(
                f"step {self.index} was entered twice; each step of ks.steps() is used in one `with step:`"
            )
        self.entered = self._open = True
        self._owner.begin(self)
        if self.watcher is not None:
            try:
                self.watcher.begin(self.index)
            except RuntimeError:  # the body's own collectives will end the same way, and that is recovered from
                if not self._owner.torn():
                    raise
        return self

    def commit(self, loss: Any = None) -> None:
        """The step is done: everything that training changed is now true, on this rank, as one.

        Args:
            loss: number or tensor with one element, kept in the run's files.
        """
        if not self._open:
            raise StepMisused(f"step {self.index}: commit() belongs inside `with step:`")
        if self.committed:
            raise StepMisused(f"step {self.index}: commit() was called twice")
        if self.watcher is not None:
            self._watch(self.watcher, loss)
        self._owner.commit(self, loss)
        self.committed = True

    def _watch(self, watcher: Watcher, loss: Any) -> None:
        """A look that others did not answer is no reason to lose a step that is complete: the owner decides on that."""
        try:
            watcher.commit(self.index, loss)
        except GuardStopped:
            raise
        except RuntimeError:
            if not self._owner.torn():
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._open = False
        if error is None:
            if not self.committed and not self._owner.interrupted():
                raise StepMisused(
                    f"step {self.index} ended without step.commit(); call it last inside `with step:`, also for a "
                    f"step that you skip"
                )
            return False
        if isinstance(error, StepUndone):
            return True
        return isinstance(error, Exception) and self._owner.failed(self, error)


class PlainLoop:
    """The same loop where nobody could replace a rank: it only counts."""

    def __init__(self, total: int, start: int) -> None:
        self._total, self.done = total, start

    def run(self) -> Iterator[Step]:
        while self.done < self._total:
            step = Step(self, self.done)
            self.done += 1
            yield step
            require_entered(step)

    def rewind(self, step: int) -> None:
        """The state of ``step`` committed steps has been put back."""
        self.done = step

    def begin(self, step: Step) -> None:
        pass

    def commit(self, step: Step, loss: Any) -> None:
        pass

    def failed(self, step: Step, error: Exception) -> bool:
        return False

    def interrupted(self) -> bool:
        return False

    def torn(self) -> bool:
        return False


def require_entered(step: Step) -> None:
    if not step.entered:
        raise StepMisused(f"step {step.index} was not used; write `with step:` around the body of the loop")


def describe_error(error: BaseException, *, step: int | None, consequence: bool) -> UserError:
    """An exception in words: where it was raised in the user's own code, as far as that can be told."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    where = (own or list(frames))[-1] if frames else None
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    flat = [line for chunk in lines for line in chunk.rstrip("\n").split("\n")]
    return UserError(
        type=type(error).__name__,
        message=str(error)[:2000],
        file=where.filename if where else "",
        line=(where.lineno or 0) if where else 0,
        function=where.name if where else "",
        step=step,
        traceback=tuple(flat[-TRACEBACK_LINES:]),
        consequence=consequence,
    )


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _is_library(file: str) -> bool:
    return file.startswith((_HERE, "<")) or "site-packages" in file or "dist-packages" in file
