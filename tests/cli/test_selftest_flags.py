"""``keepstep selftest``: floats that mean nothing are refused, and a talkative self-test is read to its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from keepstep.cli import selftest
from keepstep.cli.errors import UsageError
from keepstep.model import exits

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("seconds", "share"),
    [(INF, 1.0), (NAN, 1.0), (-1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, -3.0), (1.0, 1.5), (1.0, NAN), (1.0, INF)],
)
def test_refuses_a_budget_that_is_none(seconds: float, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(UsageError, match=r"--seconds|--share") as refused:
        selftest.examine("memory", seconds=seconds, seed=1, share=share, output="json")
    assert refused.value.code == exits.BAD_USAGE
    assert refused.value.help


def test_reads_both_pipes_while_standard_input_stays_open() -> None:
    """More on stderr than a pipe holds, before the first word on stdout; and no end of input before the child's own."""
    child = (
        "import select, sys\n"
        "sys.stderr.write('x' * 300_000); sys.stderr.flush()\n"
        "ended = bool(select.select([sys.stdin], [], [], 0.2)[0])\n"
        "print('ended' if ended else 'open')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, trouble = selftest._read(process, 30.0)
    assert said == b"open\n"
    assert len(trouble) == 300_000
    assert process.wait() == 0
