"""Named: a diagnosis as what it is looked up and compared by, the code for `keepstep explain` and the case."""

from __future__ import annotations

from keepstep.core.diagnose.result import Diagnosis
from keepstep.core.diagnose.similar import Case
from keepstep.core.diagnose.xid import SXID_LINE, XID_LINE

PARTS_COMPARED = 2
"""Of a file's path: directories above differ from job to job."""


def code_of(found: Diagnosis) -> str:
    """Of the catalogue where the first line of evidence has one, else the name of the cause."""
    text = found.evidence[0].text if found.evidence else ""
    if one := SXID_LINE.search(text):
        return f"sxid:{one['code'] or one['code2']}"
    if one := XID_LINE.search(text):
        return f"GPU{int(one['code']):03d}"
    return found.root_cause.partition(":")[0]


def case_of(found: Diagnosis) -> Case:
    """What past incidents are compared with."""
    who = found.culprit
    return Case(
        cause=found.root_cause.partition(":")[0],
        code=code_of(found),
        place=place_of(who.file, who.line),
        node=who.node if found.category in ("infrastructure", "transient") else "",
        gpu=who.gpu,
    )


def place_of(file: str, line: int | None) -> str:
    """``job/train.py:41``; empty without a file and a line."""
    return f"{'/'.join(file.replace(chr(92), '/').split('/')[-PARTS_COMPARED:])}:{line}" if file and line else ""
