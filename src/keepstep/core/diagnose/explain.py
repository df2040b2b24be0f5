"""From the bytes of a log to a diagnosis."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.core.diagnose.decide import decide
from keepstep.core.diagnose.observe import Log, Source, observe
from keepstep.core.diagnose.result import Diagnosis


def explain(lines: Iterable[bytes]) -> Diagnosis:
    """Name the cause. The pieces are taken as one stream: lines end where their newline bytes are.

    Any bytes are a legal log, and the cuts between pieces may fall anywhere.
    """
    return decide(observe(lines))


def explain_files(files: Iterable[tuple[Source, Iterable[bytes]]]) -> Diagnosis:
    """Name the cause from several logs of one job, in any order."""
    log = Log()
    for source, pieces in files:
        observe(pieces, source, log)
    return decide(log)
