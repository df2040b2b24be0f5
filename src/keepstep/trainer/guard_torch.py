"""The guard at work in one process: takes readings, compares replicas, keeps a copy, goes back to it.

All of it hangs on two calls per step, ``begin`` and ``commit``, and on hooks of the registered optimizers. What ranks
decide upon is the same on all of them (sums and gathered rows), so they decide alike; whenever a new epoch begins,
everything that a newcomer could not know is forgotten on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from keepstep.trainer.clean_torch import come_back, holders
from keepstep.trainer.dual_torch import DualRun, impossible
from keepstep.trainer.exceptions import GuardStopped, StepUndone
from keepstep.trainer.exchange_torch import everybody, gather
from keepstep.trainer.fingerprint_torch import Hasher, compare
from keepstep.trainer.guard import Guard, History, Order, Trouble, Windows
from keepstep.trainer.kept_torch import Kept
from keepstep.trainer.pieces_torch import Live
from keepstep.trainer.provenance_torch import Trace
from keepstep.trainer.quarantine_torch import Quarantine
from keepstep.trainer.readings_torch import Own, Readings, gradient_norms, over_all_ranks
from keepstep.trainer.state_torch import State
from keepstep.trainer.told import Told, describe, way_out
from keepstep.trainer.verdict import Judged
from keepstep.trainer.verdicts_torch import Verdicts

SKIPS_IN_A_ROW = 8
"""Updates left out one after the other; beyond it the step counts as any other with numbers that are none."""
SAMPLES = 16
"""Sample numbers of a batch that are told."""


class Guardian:
    """One process's guard.

    Args:
        settings: as ``guard.settle`` gave them.
        state: the registered objects; bound before the first step begins.
        epoch: the present one; it changes when ranks have been replaced.
        rewind: tells the loop which step it goes on from. All ranks call it at the same place.
        tell: takes what is to be said, on rank 0 only.
        quiet: ends copies of the state that are under way beside the training.
        replaceable: a controller takes a machine out that corrupts again and again.
        durable: whether a step is about to be saved durably; then replicas are compared before, so that no generation
            is written that they do not agree on.
    """

    def __init__(
        self,
        settings: Guard,
        state: State,
        *,
        rank: int,
        epoch: Callable[[], int],
        rewind: Callable[[int], None],
        tell: Callable[[Told], None],
        quiet: Callable[[], None] = lambda: None,
        durable: Callable[[int], bool] = lambda step: False,
        replaceable: bool = False,
    ) -> None:
        self._settings, self._state, self._rank = settings, state, rank
        self._epoch_now, self._rewind, self._say = epoch, rewind, tell
        self._quiet, self._durable, self._replaceable = quiet, durable, replaceable
        self._acts = settings.mode == "on"
        self._hasher = Hasher()
        self._kept = Kept(self._hasher)
        self._ready = False
        self._alone_told = self._kept_told = False
        self._epoch, self._step = -1, -1
        self._pending: Callable[[], list[Own]] | None = None
        self._fresh = True
        """The first step of an epoch: compared and kept, whatever its number."""
        self._agreed: int | None = None
        self._skips: set[int] = set()
        self._row = 0
        self._traced: dict[int, str] = {}
        self._awaited: Trouble | None = None
        self._sounding: set[str] = set()
        self._dual: DualRun | None = None
        self._clean: int | None = None
        """Step of the copy from before a fault amid which ranks were replaced."""
        self._batches: deque[tuple[int, dict[str, int]]] = deque(maxlen=2 * settings.every + 2)

    # ---------------------------------------------------------------- the two calls

    def begin(self, step: int) -> None:
        if not self._ready:
            self._prepare()
        if (epoch := self._epoch_now()) != self._epoch:
            self._start_anew(epoch)
        self._step = step
        norms = self._settings.norms
        if self._dual is not None and self._dual.trouble.step == step:
            self._dual.begin()
        self._readings.begin(step, norms=norms > 0 and (self._awaited is not None or step % norms == 0))
        self._trace.begin()
        self._batches.append((step, {name: item.position for name, item in self._data.items()}))

    def commit(self, step: int, loss: Any) -> None:
        done = step + 1
        if self._fresh and self._replicated and (ranks := holders(self._clean)):
            self._come_back(step, ranks)
        if self._dual is not None and self._dual.trouble.step == step:
            self._end_dual(loss)
        self._readings.commit(loss)
        if self._trace.armed and (first := self._trace.first()):
            self._traced[step] = first
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._judge(pending())
        saved = self._durable(done)
        compares = self._settings.compare_every > 0 and (
            self._fresh or saved or done % self._settings.compare_every == 0
        )
        keeps = self._keeps and (self._fresh or done % self._settings.keep_every == 0)
        rests = compares or keeps or saved
        if rests or done % self._settings.every == 0:
            # With a device at work the copy is read at the next commit; not where something is about to rest on it.
            self._pending = self._readings.hand_over()
            if rests or not self._on_device:
                pending, self._pending = self._pending, None
                self._judge(pending())
        if compares:
            self._compare(done)
        if keeps:
            self._keep(done)
        self._fresh = False

    # ---------------------------------------------------------------- beginnings

    def _prepare(self) -> None:
        """Everything is built and bound; once per process."""
        names = {id(parameter): name[2:] for name, parameter in self._state.bound()}
        self._names: Mapping[int, str] = names
        self._readings = Readings(names)
        self._trace = Trace([(name[2:], parameter) for name, parameter in self._state.bound()])
        others = self._state.others
        self._data = {k: item for k, item in others.items() if hasattr(item, "indices") and hasattr(item, "position")}
        self._quarantine = Quarantine(self._data, self._rank)
        self._on_device = any(parameter.device.type != "cpu" for _, parameter in self._state.bound())
        g = self._settings
        self._keeps = self._acts and g.keep_every > 0 and "rollback" in (g.nonfinite, g.spikes, g.replicas)
        for optimizer in self._state.optimizers.values():
            optimizer.register_step_pre_hook(self._before_update)
        self._replicated = self._state.replicated  # asking walks all modules
        self._ready = True

    def _start_anew(self, epoch: int) -> None:
        """A newcomer knows nothing of what was; so nobody does."""
        self._epoch = epoch
        self._readings.forget()
        self._windows = Windows(self._settings)
        self._history = History(self._settings, replaceable=self._replaceable)
        self._verdicts = Verdicts(self._tell, self._quarantine)
        self._quarantine.come_together()
        self._pending = None
        # Amid a fault, what this epoch began with may hold it; the copy from before does not.
        self._clean = self._kept.step if self._awaited is not None and self._replicated else None
        if self._clean is None:
            self._kept.forget()
        self._skips.clear()
        self._row = 0
        self._traced.clear()
        self._awaited = None
        self._sounding.clear()
        self._batches.clear()
        self._leave_dual()
        self._trace.disarm()
        self._agreed = None
        self._fresh = True

    # ---------------------------------------------------------------- before an update

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._step in self._skips:
            _drop(optimizer)
            return
        self._readings.before_update(optimizer)
        if self._acts and self._settings.skip and not self._update_is_finite(optimizer):
            self._row += 1
            if self._row <= SKIPS_IN_A_ROW:
                self._skips.add(self._step)
                _drop(optimizer)
                self._tell("skipped", self._step, "gradients are not finite numbers; this update is left out")
        elif self._settings.skip:
            self._row = 0

    def _update_is_finite(self, optimizer: Optimizer) -> bool:
        """On all ranks: an update that only some of them make would part them for good. Waits for the device."""
        norms = [norm for _, held in gradient_norms(optimizer, self._names) for norm in held]
        return everybody(all(bool(torch.isfinite(norm)) for norm in norms))

    # ---------------------------------------------------------------- losses and norms

    def _judge(self, own: list[Own]) -> None:
        kinds: set[str] = set()
        for mine, reading in zip(own, over_all_ranks(own, replicated=self._replicated), strict=True):
            self._verdicts.note(mine)
            if reading.step in self._skips:
                continue
            trouble = self._windows.judge(reading)
            if trouble is None:
                self._look_for_the_awaited(reading.step)
                self._verdicts.well(reading.step)
                continue
            if trouble.kind == "nonfinite":
                trouble = self._locate(trouble, mine)
            if trouble.kind not in kinds and trouble.kind not in self._sounding:
                kinds.add(trouble.kind)
                self._meet(trouble)
            kinds.add(trouble.kind)
        # A run whose every loss is NaN says so once, and again only when it has recovered in between.
        self._sounding = kinds | (self._sounding & {"replicas"})

    def _locate(self, trouble: Trouble, mine: Own) -> Trouble:
        """Which ranks it began on, and with which parameter. Collective."""
        bad_loss = mine.loss is not None and mine.loss - mine.loss != 0.0
        traced = self._traced.get(trouble.step, "")
        # Backward runs from the last parameter to the first; the last one that is bad is where it came in.
        rows = gather([bad_loss, traced, mine.bad[-1] if mine.bad else "", self._samples(trouble.step)])
        own_gradient = [rank for rank, (_, first, _, _) in enumerate(rows) if first]
        losses = [rank for rank, (bad, _, _, _) in enumerate(rows) if bad]
        shards = [] if self._replicated else [rank for rank, (_, _, last, _) in enumerate(rows) if last]
        ranks = own_gradient or losses or shards
        tensor = rows[ranks[0]][1] if own_gradient else next((last for _, _, last, _ in rows if last), "")
        if len(ranks) == len(rows) > 1:
            return trouble._replace(tensor=tensor, why=f"{trouble.why}; on all ranks alike", everywhere=True)
        batch = "".join(f"; rank {rank} had {rows[rank][3]}" for rank in ranks[:1] if rows[rank][3])
        return trouble._replace(ranks=tuple(ranks), tensor=tensor, why=trouble.why + batch)

    def _samples_of(self, step: int) -> dict[str, list[int]]:
        """Which samples this rank used in a step, as far as registered data can tell."""
        positions = next((held for at, held in reversed(self._batches) if at == step), {})
        return {name: list(self._data[name].indices(position)) for name, position in positions.items()}

    def _samples(self, step: int) -> str:
        said = []
        for name, numbers in self._samples_of(step).items():
            more = f" and {len(numbers) - SAMPLES} more" if len(numbers) > SAMPLES else ""
            said.append(f"samples {', '.join(map(str, numbers[:SAMPLES]))}{more} of {name}")
        return ", ".join(said)

    def _look_for_the_awaited(self, step: int) -> None:
        awaited = self._awaited
        if awaited is not None and awaited.kind != "replicas" and step >= awaited.step:
            self._gone(awaited, "the same step came out well when it was done again: a transient fault")
            self._verdicts.passed(awaited)

    # ---------------------------------------------------------------- replicas

    def _compare(self, done: int) -> None:
        lives = self._compared()
        found = compare(lives, self._hasher)
        if found.vote.agreed:
            self._agreed = done
            if not found.vote.compared and not self._alone_told:
                self._alone_told = True
                self._tell("alone", done - 1, "no rank holds what another one holds, so there is nothing to compare")
            awaited = self._awaited
            if awaited is not None and awaited.kind == "replicas" and done >= awaited.step:
                self._gone(awaited, "the replicas agree again")
                self._verdicts.agree_again(awaited, done, found.prints)
            self._sounding.discard("replicas")
            return
        if "replicas" not in self._sounding:
            self._verdicts.differ(done, found.prints, found.vote.tied)
            self._meet(describe(found, done - 1), tied=found.vote.tied)
            self._sounding.add("replicas")

    def _compared(self) -> list[Live]:
        """What may have replicas: pieces of distributed tensors, and everything where ranks hold the same."""
        return [one for one in self._state.shards() if self._replicated or one.mates is not None]

    # ---------------------------------------------------------------- going back

    def _keep(self, done: int) -> None:
        if self._sounding:
            return  # told and not acted upon: this is no state to go back to
        self._state.settle_buckets()
        self._kept.take(self._state, done)
        self._verdicts.forget_before(done)
        if not self._kept_told:
            self._kept_told = True
            size = f"{self._kept.nbytes / 1e6:.1f} MB per rank"
            self._tell("kept", done - 1, f"a copy of the state is kept in memory to go back to ({size})")

    def _meet(self, trouble: Trouble, tied: tuple[int, ...] = ()) -> None:
        awaited = self._awaited
        again = awaited is not None and awaited.kind == trouble.kind != "replicas" and trouble.step <= awaited.step
        named = self._history.named_before(trouble)
        order = self._history.decide(trouble, kept=self._kept.step, again=again)
        since = self._agreed if trouble.kind == "replicas" else None
        why = f"{trouble.why}; {order.why}"
        self._tell(
            trouble.kind, trouble.step, why, ranks=trouble.ranks, tensor=trouble.tensor, since=since, others=tied
        )
        self._verdicts.met(trouble, again=again, named=named if self._acts else ())
        if order.action == "stop":
            raise GuardStopped(f"step {trouble.step}: {trouble.why}; {order.why}. {way_out(trouble)}")
        if order.action == "rollback":
            self._go_back(trouble, self._compared_first(trouble, order))

    # ---------------------------------------------------------------- another rank does the same work

    def _compared_first(self, trouble: Trouble, order: Order) -> Order:
        """Before an update is left out: have another rank do that step's work, where one can."""
        self._leave_dual()
        if not order.skip:
            return order
        if why := impossible(trouble, self._state, self._data):
            self._verdicts.compared = f"no other rank could do the same work: {why}"
            return order
        self._dual = DualRun(trouble, self._data, self._trace, self._rank)
        return Order("rollback", self._dual.words)

    def _come_back(self, step: int, ranks: tuple[int, ...]) -> None:
        """Ranks were replaced amid a fault: everybody goes back to what survivors kept from before it."""
        self._quiet()
        self._clean = None
        clean = come_back(self._kept, self._state, ranks, self._rank)
        self._kept.forget()
        self._readings.forget()
        for optimizer in self._state.optimizers.values():
            optimizer.zero_grad()
        self._rewind(clean)
        why = f"ranks were replaced amid a fault: training goes on from step {clean}, which is clean"
        self._tell("rolled_back", step, why, since=clean)
        raise StepUndone(f"step {step} was undone; training goes on from step {clean}")

    def _end_dual(self, loss: Any) -> None:
        """The step has been done for comparison only: undo it, and leave its update out unless it is well by itself."""
        assert self._dual is not None
        dual, self._dual = self._dual, None
        outcome = dual.end(loss)
        self._verdicts.compared = outcome.why
        skip = outcome.judged is None or outcome.judged.verdict == "hardware"
        self._go_back(dual.trouble, Order("rollback", outcome.why, skip), judged=outcome.judged)

    def _leave_dual(self) -> None:
        if self._dual is not None:
            self._dual.leave()
            self._dual = None

    def _go_back(self, trouble: Trouble, order: Order, judged: Judged | None = None) -> None:
        self._quiet()
        samples = self._samples_of(trouble.step)
        self._verdicts.undone(trouble, since=self._kept.step, skip=order.skip, samples=samples)
        if judged is not None:
            self._verdicts.by_comparison(judged)
        step = self._kept.put_back(self._state)
        self._windows.forget_from(step)
        self._readings.forget()
        self._pending = None
        self._traced.clear()
        self._sounding.clear()
        self._batches.clear()
        self._awaited = None if order.skip or judged is not None else trouble
        if order.skip:
            self._skips.add(trouble.step)
            self._trace.disarm()
        elif trouble.kind == "nonfinite":
            self._trace.arm()
        for optimizer in self._state.optimizers.values():
            optimizer.zero_grad()
        self._rewind(step)
        skipped = f"; the update of step {trouble.step} is left out" if order.skip else ""
        skipped = f"; {self._dual.words}" if self._dual is not None else skipped
        self._tell("rolled_back", trouble.step, f"training goes on from step {step}{skipped}", since=step)
        raise StepUndone(f"step {trouble.step} was undone; training goes on from step {step}")

    def _gone(self, trouble: Trouble, why: str) -> None:
        self._awaited = None
        self._trace.disarm()
        self._tell("gone", trouble.step, why, ranks=trouble.ranks, tensor=trouble.tensor)

    def _tell(self, what: str, step: int, why: str, **more: Any) -> None:
        if self._rank == 0:
            self._say(Told(what=what, step=step, why=why, **more))


def _drop(optimizer: Optimizer) -> None:
    """Leave this update out: an optimizer does nothing at all for a parameter without gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
