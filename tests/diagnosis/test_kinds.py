"""Short notes of incidents, one for each kind of fault, as operators write them down: the category, the culprit that
the note names, and that nobody is evicted for what is no machine's fault.

Each begins with ``## name | category | culprit | action``; culprit and action may be empty.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.diagnosis_cases import EVICTING, NOBODY_TO_EVICT, gpu, same_path

from keepstep.core.diagnose.explain import explain
from keepstep.core.diagnose.result import Culprit

FOLDER = Path(__file__).parent / "kinds"
NOTES = [
    note
    for path in sorted(FOLDER.glob("*.txt"))
    for note in re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]
]


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.partition(" ")[0])
def test_a_note_of_an_incident_is_understood(note: str) -> None:
    head, _, log = note.partition("\n")
    _, category, culprit, action = (part.strip() for part in head.split("|"))
    said = explain([log.encode()])
    assert said.category == category
    for name, wanted in (part.split("=", 1) for part in culprit.split()):
        assert is_named(said.culprit, name, wanted), (name, wanted, said.culprit)
    assert not action or said.action == action
    assert category not in NOBODY_TO_EVICT or said.action not in EVICTING


def is_named(culprit: Culprit, name: str, wanted: str) -> bool:
    if name == "gpu":
        return gpu(culprit.gpu) == gpu(wanted)
    if name == "file":
        return same_path(wanted, culprit.file) or same_path(wanted, culprit.thing)
    return str(getattr(culprit, name)) == wanted
