"""The meter: what collectives did, and the hook before the first reduction of a step."""

from __future__ import annotations

from keepstep.trainer.meter import Meter


def test_the_hook_runs_once_per_step_before_a_reduction() -> None:
    """Not before other collectives, not twice, not for collectives of its own, and again after the next mark."""
    meter, calls = Meter(), []

    def hook() -> None:
        calls.append(meter.started)
        meter.launch(reduces=True, world=True)

    meter.before_reduce = hook
    meter.mark()
    meter.launch(reduces=False, world=True)
    assert calls == []
    meter.launch(reduces=True, world=False)
    meter.launch(reduces=True, world=False)
    assert calls == [1]
    meter.mark()
    meter.launch(reduces=True, world=False)
    assert len(calls) == 2
    meter.before_reduce = None
    meter.mark()
    meter.launch(reduces=True, world=False)
    assert len(calls) == 2


def test_progress_is_told_at_each_end() -> None:
    """(started, finished) at each launch and each finish."""
    meter, seen = Meter(), []
    meter.on_progress = lambda started, finished: seen.append((started, finished))
    meter.launch(reduces=False, world=False)
    meter.launch(reduces=False, world=False)
    meter.finish()
    assert seen == [(1, 0), (2, 0), (2, 1)]


def test_the_first_error_is_kept_in_one_line() -> None:
    """What broke first is the evidence; later errors follow from it."""
    meter = Meter()
    meter.breaks(RuntimeError("connection closed\nmore"))
    meter.breaks(ValueError("later"))
    assert meter.broken == "RuntimeError: connection closed"
