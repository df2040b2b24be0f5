"""A process that cannot take part says so in a sentence, to people and to the agent, and ends with the code for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.model import exits
from keepstep.model.wire import WorkerFailed
from keepstep.trainer.exceptions import CannotResume
from keepstep.trainer.loop_torch import Loop
from keepstep.trainer.session_torch import Session


def refusing(monkeypatch: pytest.MonkeyPatch, error: Exception, *, interrupted: bool = False) -> tuple[Loop, list[Any]]:
    """A loop whose durable state cannot be put back because of ``error``."""
    sent: list[Any] = []
    session: Any = SimpleNamespace(
        token="", snap_dir=None, rank=0, _reported=False,
        roster=SimpleNamespace(snapshot_every=1, mode="fresh", epoch=1),
        state=SimpleNamespace(bind=lambda: None, expected_bytes=lambda: 0), check_room=lambda: None,
        snapshots=SimpleNamespace(watch=lambda state: None, waited_s=0.0, config=SimpleNamespace(durable=False)),
        groups=SimpleNamespace(stand_in=False, broken=None, aborted=False),
        control=SimpleNamespace(pending=None, send=sent.append, flush=lambda seconds: None),
    )  # fmt: skip
    session.refuse = lambda problem, code: Session.refuse(session, problem, code)
    loop = object.__new__(Loop)
    loop._s, loop._total, loop._start, loop.done = session, 5, 0, 0
    loop._pacing = SimpleNamespace(restart=lambda step, every: None, every=0)  # type: ignore[assignment]

    def resume(_: object) -> None:
        raise error

    monkeypatch.setattr(loop, "_resume", resume)
    return loop, sent


def test_state_that_cannot_be_put_back_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No traceback, no line of the script: it is neither the code's fault nor better at the next try."""
    loop, sent = refusing(monkeypatch, CannotResume("step 60 does not fit this model; use another directory"))
    with pytest.raises(SystemExit) as ended:
        loop._enter()
    assert ended.value.code == exits.BAD_CONFIG
    assert capfd.readouterr().err == "keepstep: step 60 does not fit this model; use another directory\n"
    (failed,) = sent
    assert isinstance(failed, WorkerFailed)
    assert (failed.error.type, failed.error.file, failed.error.traceback) == ("CannotResume", "", ())


def test_other_faults_of_a_start_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw must be seen as it is."""
    loop, sent = refusing(monkeypatch, KeyError("what"))
    with pytest.raises(KeyError):
        loop._enter()
    assert sent == []
