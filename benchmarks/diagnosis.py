"""How often the diagnosis is right, on labelled logs, and how fast it reads.

    python -m benchmarks.diagnosis --json

Each log of ``tests/diagnosis/cases`` is explained and compared with its label: category, culprit (every part that the
label names has to be right), root cause (the same family of faults), whether it is transient, and the action. It is
then explained again amid lines of a healthy job, which must not change the verdict. Last a large log is written, read
and timed, on one core.

``--show-wrong`` prints each wrong answer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.diagnosis_cases import (
    CATEGORIES,
    FIELDS,
    FILES,
    UNREAD,
    Case,
    cases,
    families,
    head,
    innocent_node,
    same_cause,
    same_culprit,
    wrong_eviction,
)
from benchmarks.diagnosis_noise import FAULT_NODE, MEGA, crowded, large
from keepstep.core.diagnose.explain import explain
from keepstep.core.diagnose.result import Diagnosis

CATEGORY_ACCURACY = 0.95
CULPRIT_ACCURACY = 0.90
CROWDED_SAME = 0.95
THROUGHPUT_MB_S = 50.0
PIECE = 2**20


@dataclass(frozen=True)
class Judged:
    """One log, and what was said about it: alone, and amid noise."""

    case: Case
    got: Diagnosis
    amid_noise: Diagnosis | None

    @property
    def category(self) -> bool:
        return self.got.category == self.case.category

    @property
    def culprit(self) -> bool:
        return same_culprit(self.case, self.got.culprit)

    @property
    def unmoved(self) -> bool:
        """Whether noise left the verdict as it was: everything said about the culprit, too."""
        return self.amid_noise is None or verdict(self.got) == verdict(self.amid_noise)


def verdict(got: Diagnosis) -> tuple[object, ...]:
    return (got.category, got.action, head(got.root_cause), *(getattr(got.culprit, field) for field in FIELDS))


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--files", nargs="+", choices=FILES + UNREAD, default=list(FILES), help="which logs")
    ask.add_argument("--size-mb", type=int, default=200, help="of the large log; 0 leaves it out")
    ask.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    ask.add_argument("--show-wrong", action="store_true", help="expected and got of each wrong answer, on stderr")
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    judged = judge(cases(args.files), args.seed)
    found = report(args, judged, throughput(args.size_mb, args.seed) if args.size_mb else None)
    if args.show_wrong:
        show_wrong(judged)
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))
    return 0


def judge(every: Sequence[Case], seed: int | None) -> list[Judged]:
    """Explain each log, and again amid noise unless ``seed`` is ``None``."""
    return [
        Judged(
            case,
            explain(case.lines()),
            None if seed is None else explain(crowded(case.lines(), random.Random(f"{seed} {case.id}"))),
        )
        for case in every
    ]


def scores(judged: Sequence[Judged]) -> dict[str, Any]:
    family = families()
    return {
        "cases": len(judged),
        "category_accuracy": share(judged, lambda one: one.category),
        "culprit_accuracy": share([one for one in judged if one.case.culprit], lambda one: one.culprit),
        "root_cause_accuracy": share(judged, lambda one: same_cause(one.case, one.got, family)),
        "transient_accuracy": share(judged, lambda one: one.got.transient == one.case.transient),
        "action_accuracy": share(judged, lambda one: one.got.action == head(one.case.action)),
        "wrong_evictions": sum(wrong_eviction(one.case, one.got) for one in judged),
        "wrong_evictions_amid_noise": sum(
            one.amid_noise is not None and wrong_eviction(one.case, one.amid_noise) for one in judged
        ),
        "innocent_nodes": sum(innocent_node(one.case, one.got) for one in judged),
        "unknown": sum(one.got.category == "unknown" for one in judged),
        "same_amid_noise": share(judged, lambda one: one.unmoved),
    }


def share(judged: Sequence[Judged], right: Callable[[Judged], bool]) -> float | None:
    return round(sum(right(one) for one in judged) / len(judged), 4) if judged else None


def confusion(judged: Sequence[Judged]) -> dict[str, dict[str, int]]:
    """For each true category, how often which one was said."""
    return {
        truth: dict(Counter(one.got.category for one in judged if one.case.category == truth)) for truth in CATEGORIES
    }


def throughput(size_mb: int, seed: int) -> dict[str, Any]:
    """Megabytes (10^6) a second of CPU time for a log from disk, and whether the planted fault was found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.log"
        with path.open("wb") as out:
            out.writelines(large(size_mb, random.Random(seed)))
        before = time.process_time()
        with path.open("rb") as log:
            got = explain(iter(partial(log.read, PIECE), b""))
        took = time.process_time() - before
        size = path.stat().st_size
    return {"mb": round(size / MEGA, 1), "mb_s": round(size / MEGA / took, 1), "found": got.culprit.node == FAULT_NODE}


def report(args: argparse.Namespace, judged: Sequence[Judged], large_log: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"benchmark": "diagnosis", "seed": args.seed, **scores(judged)}
    found["throughput_mb_s"] = large_log["mb_s"] if large_log else None
    found["large_log"] = large_log
    found["within"] = within(found)
    found["confusion"] = confusion(judged)
    found["by_file"] = {name: scores([one for one in judged if one.case.file == name]) for name in args.files}
    return found


def within(found: dict[str, Any]) -> dict[str, bool | None]:
    """The bounds that this run has to keep; ``None`` where something needed was not measured."""
    culprit, large_log = found["culprit_accuracy"], found["large_log"]
    return {
        "category_accuracy": found["category_accuracy"] >= CATEGORY_ACCURACY,
        "culprit_accuracy": None if culprit is None else culprit >= CULPRIT_ACCURACY,
        "wrong_evictions": found["wrong_evictions"] == 0 and found["wrong_evictions_amid_noise"] == 0,
        "same_amid_noise": found["same_amid_noise"] >= CROWDED_SAME,
        "throughput": None if large_log is None else large_log["mb_s"] >= THROUGHPUT_MB_S,
        "large_log_found": None if large_log is None else large_log["found"],
    }


def show_wrong(judged: Sequence[Judged]) -> None:
    family = families()
    for one in judged:
        case, got = one.case, one.got
        wrong = [
            name
            for name, right in (
                ("category", one.category),
                ("culprit", one.culprit),
                ("root_cause", same_cause(case, got, family)),
                ("transient", got.transient == case.transient),
                ("action", got.action == head(case.action)),
                ("EVICTION", not wrong_eviction(case, got)),
                ("noise", one.unmoved),
            )
            if not right
        ]
        if not wrong:
            continue
        print(f"{case.id}: {', '.join(wrong)}", file=sys.stderr)
        named = {key: value for key, value in msgspec.to_builtins(got.culprit).items() if value not in ("", None)}
        expected = (
            f"{case.category}, {case.root_cause}, {case.culprit}, transient {case.transient}, {head(case.action)}"
        )
        print(f"  expected {expected}", file=sys.stderr)
        print(
            f"  got      {got.category}, {got.root_cause}, {named}, transient {got.transient}, {got.action}",
            file=sys.stderr,
        )
        if not one.unmoved and one.amid_noise is not None:
            other = one.amid_noise
            print(f"  in noise {other.category}, {head(other.root_cause)}, {other.action}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
