"""Verdicts as they come about in one process: notes while steps are done, a word when ranks have compared them.

All ranks call each method at the same place; those that gather are collective, and are called only when something was
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keepstep.trainer.exchange_torch import gather
from keepstep.trainer.guard import Trouble
from keepstep.trainer.quarantine_torch import Quarantine
from keepstep.trainer.readings_torch import Own
from keepstep.trainer.verdict import Judged, Losses, Seen, Watch, agree_again, differs_again, everywhere, passed

SAMPLES_TOLD = 64
"""Sample numbers of a quarantined batch that are told; the file has them all."""


class Verdicts:
    """One epoch's.

    Args:
        tell: as ``Guardian._tell``.
    """

    def __init__(self, tell: Callable[..., None], quarantine: Quarantine) -> None:
        self._tell, self._quarantine = tell, quarantine
        self._losses: dict[int, str] = {}
        """Own losses since the copy that ranks go back to."""
        self._first: dict[int, str] = {}
        """Those of the first time, up to the trouble."""
        self._prints: tuple[int, tuple[int, ...]] = -1, ()
        """What ranks held when their replicas differed, and behind how many steps."""
        self._tied: tuple[int, ...] = ()
        self._since: int | None = None
        self.compared = ""
        """What another rank came to that did the same work, in words."""
        self._watch: Watch | None = None
        self._suspects: Mapping[str, list[int]] = {}
        """Own samples of the step whose update is left out."""

    # ---------------------------------------------------------------- notes

    def note(self, own: Own) -> None:
        if own.loss is not None:
            self._losses[own.step] = own.loss.hex()

    def forget_before(self, step: int) -> None:
        """A newer copy is kept: nobody goes back behind it."""
        self._losses = {at: loss for at, loss in self._losses.items() if at >= step}

    def differ(self, done: int, prints: tuple[int, ...], tied: tuple[int, ...]) -> None:
        """Replicas differ behind ``done`` steps."""
        self._prints, self._tied = (done, prints), tied

    def undone(self, trouble: Trouble, *, since: int | None, skip: bool, samples: Mapping[str, list[int]]) -> None:
        """Steps from ``since`` on are about to be done again, the one in question without its update where ``skip``."""
        self._since = since
        self._first, self._losses = self._losses, {}
        self._watch = Watch(trouble) if skip else None
        self._suspects = samples if skip else {}

    # ---------------------------------------------------------------- verdicts

    def passed(self, trouble: Trouble) -> None:
        """A loss or gradient came out well. Collective."""
        self._pronounce(passed(trouble, *self._compared(trouble)))

    def agree_again(self, trouble: Trouble, done: int, prints: tuple[int, ...]) -> None:
        """Replicas that differed are equal. Collective."""
        at, before = self._prints
        first, again = self._compared(trouble)
        self._pronounce(
            agree_again(trouble, Seen(before, first), Seen(prints if at == done else (), again), self._tied)
        )

    def _compared(self, trouble: Trouble) -> tuple[list[Losses], list[Losses]]:
        """All ranks' losses up to the step in question, the first time and now. Collective."""
        upto = [{at: loss for at, loss in held.items() if at <= trouble.step} for held in (self._first, self._losses)]
        rows = gather([[[at, loss] for at, loss in held.items()] for held in upto])
        first: list[Losses] = [dict(row[0]) for row in rows]
        again: list[Losses] = [dict(row[1]) for row in rows]
        return first, again

    def met(self, trouble: Trouble, *, again: bool, named: Sequence[int]) -> None:
        """Something is wrong, perhaps again."""
        if self._watch is not None and (judged := self._watch.bad(trouble)) is not None:
            self._watch = None
            self._pronounce(judged)
        elif trouble.kind == "replicas" and named:
            self._pronounce(differs_again(trouble, named, len(self._prints[1])))
        elif again and trouble.everywhere:
            self._pronounce(everywhere(trouble))

    def by_comparison(self, judged: Judged) -> None:
        """Another rank has done the same work: it is the machine, and the batch is not to blame."""
        self._watch = None
        self._pronounce(judged)

    def well(self, step: int) -> None:
        """A step is in order; enough of them behind one that was left out tell what it was. Collective then."""
        if self._watch is None or (judged := self._watch.well(step)) is None:
            return
        self._watch = None
        rows: list[dict[str, list[int]]] = gather(dict(self._suspects))
        blamed = [row for rank, row in enumerate(rows) if rank in judged.ranks or not judged.ranks]
        samples: dict[str, list[int]] = {}
        for row in blamed:
            for name, numbers in row.items():
                samples.setdefault(name, []).extend(numbers)
        said = tuple(f"{name}: {_numbers(numbers)}" for name, numbers in samples.items())
        compared, self.compared = self.compared, ""
        if compared:
            judged = judged._replace(why=f"{judged.why}; {compared}")
        self._pronounce(judged, batches=said)
        if not samples:
            return
        cannot = self._quarantine.leave_out(judged.step, samples, judged.why)
        why = "steps that would use them are passed over from now on"
        if cannot:
            why = f"{', '.join(cannot)} cannot leave samples out (keepstep.StepData can): they will come again"
        self._tell("quarantined", judged.step, f"{'; '.join(said)}: {why}", batches=said)

    def _pronounce(self, judged: Judged, **more: Any) -> None:
        self._tell(
            "judged", judged.step, judged.why, ranks=judged.ranks, tensor=judged.tensor, verdict=judged.verdict,
            others=judged.others, since=self._since, **more,
        )  # fmt: skip


def _numbers(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - SAMPLES_TOLD} more" if len(numbers) > SAMPLES_TOLD else ""
    return ", ".join(map(str, numbers[:SAMPLES_TOLD])) + more
