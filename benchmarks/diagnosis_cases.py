"""Labelled logs, and what counts as a right answer to one.

The logs lie in ``tests/diagnosis/cases``; docs/explanation/diagnosis-corpus.md says how their labels were made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.core.diagnose.result import Culprit, Diagnosis

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "diagnosis" / "cases"
FILES = ("published", "own", "heldout", "heldout2")
UNREAD = ("heldout3", "heldout4", "heldout5")
"""Logs that no rule was written for: they tell how well others are understood, and are held to no bound."""
CATEGORIES = ("infrastructure", "user_code", "data", "transient", "none")
FIELDS = ("node", "gpu", "rank", "file", "line")
EITHER = "|"
"""Between the names that a log has for the same GPU."""
EVICTING = frozenset({"replace_node", "isolate_and_verify"})
NOBODY_TO_EVICT = frozenset({"user_code", "data", "none"})


@dataclass(frozen=True, kw_only=True)
class Case:
    """One labelled log.

    Attributes:
        file: which of ``FILES`` it is from.
        root_cause: stable id, a colon, one sentence.
        culprit: what the log allows to know, by the names in ``FIELDS``; the others are not there.
        action: verb, a colon, one sentence.
        source: where the form of its lines is from.
    """

    file: str
    id: str
    log: str
    category: str
    root_cause: str
    culprit: dict[str, str | int]
    transient: bool
    action: str
    source: str

    def lines(self) -> Iterator[bytes]:
        return iter(self.log.encode("utf-8", "surrogateescape").splitlines(keepends=True))


def cases(files: Iterable[str] = FILES) -> list[Case]:
    return [read(name, json.loads(line)) for name in files for line in raw_lines(name)]


def raw_lines(name: str) -> list[str]:
    return (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def read(name: str, fields: dict[str, Any]) -> Case:
    return Case(
        file=name,
        id=fields["id"],
        log=fields["log"],
        category=fields["truth_category"],
        root_cause=fields["truth_root_cause"],
        culprit={key: value for key, value in fields["truth_culprit"].items() if value is not None},
        transient=fields["transient"],
        action=fields["recommended_action"],
        source=fields["source"],
    )


def families() -> dict[str, str]:
    """The family of each root cause id: names for the same kind of fault."""
    table: dict[str, list[str]] = json.loads((FOLDER / "families.json").read_text(encoding="utf-8"))
    return {one: family for family, ids in table.items() for one in ids}


def head(text: str) -> str:
    """What stands before the colon."""
    return text.partition(":")[0].strip()


def same_cause(case: Case, got: Diagnosis, family: dict[str, str]) -> bool:
    expected, found = head(case.root_cause), head(got.root_cause)
    return expected == found or family.get(expected, expected) == family.get(found, found)


def same_culprit(case: Case, culprit: Culprit) -> bool:
    """Whether every field that the truth names is right; a part of it is not enough."""
    return all(same_field(case, key, wanted, culprit) for key, wanted in case.culprit.items())


def same_field(case: Case, key: str, wanted: str | int, culprit: Culprit) -> bool:
    if key == "gpu":
        return any(gpu(one) == gpu(culprit.gpu) for one in str(wanted).split(EITHER))
    if key == "file":
        named = (culprit.file, culprit.thing) if case.category == "data" else (culprit.file,)
        return any(same_path(str(wanted), one) for one in named)
    return bool(getattr(culprit, key) == wanted)


def gpu(name: str) -> str:
    """``GPU 3``, ``gpu3`` and ``3`` are one GPU, ``00000000:3B:00.0`` and ``0000:3b:00`` are one too."""
    text = name.strip().lower()
    address = re.fullmatch(r"(?:pci:)?(?:[0-9a-f]{4})?([0-9a-f]{4}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?", text)
    if address:
        return ":".join(address.groups())
    index = re.fullmatch(r"(?:gpu)?\s*#?(\d+)", text)
    return index[1] if index else text


def same_path(wanted: str, found: str) -> bool:
    """Equal, or one is the end of the other in whole components."""
    if not found:
        return False
    return wanted == found or wanted.endswith("/" + found) or found.endswith("/" + wanted)


def wrong_eviction(case: Case, got: Diagnosis) -> bool:
    """A machine is to go although no machine is to blame."""
    return got.action in EVICTING and case.category in NOBODY_TO_EVICT


def innocent_node(case: Case, got: Diagnosis) -> bool:
    """A machine is to go, and it is another one than the culprit, or there is none to blame among many alike."""
    if got.action not in EVICTING or case.category in NOBODY_TO_EVICT:
        return False
    wanted = case.culprit.get("node")
    if wanted is None:
        return head(case.action) not in EVICTING
    return bool(got.culprit.node) and got.culprit.node != wanted
