"""Output: one table of values, five forms.

``table`` and ``wide`` draw columns on a terminal and print tab-separated values elsewhere; ``json`` is the whole
answer with its schema, ``jsonl`` one row per line, ``csv`` what spreadsheets read.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from msgspec import Struct

from keepstep.cli.errors import UsageError, closest

Form = Literal["table", "json", "jsonl", "csv", "wide"]
FORMS: tuple[str, ...] = get_args(Form)
MEANING = {
    "green": {"RUNNING", "HEALTHY", "RESOLVED", "FINISHED", "ok"},
    "yellow": {
        "PENDING",
        "STARTING",
        "RECOVERING",
        "WAITING",
        "SUSPECT",
        "OPEN",
        "LOCATING",
        "DECIDED",
        "VERIFYING",
        "warn",
    },
    "red": {"FAILED", "ESCALATED", "QUARANTINED", "RETIRED", "STOPPED", "LOST", "bad", "damaged"},
}
"""Colour is never the only carrier: the word is always there."""


class Column(Struct, frozen=True):
    """A column: its title, the key in the row, and whether only ``wide`` shows it."""

    title: str
    key: str
    wide: bool = False


def check_form(text: str) -> Form:
    if text not in FORMS:
        near = closest(text, FORMS)
        raise UsageError(
            f"-o {text} is no output form", help=f"did you mean {near}?" if near else f"one of {', '.join(FORMS)}"
        )
    return text  # type: ignore[return-value]


def show(answer: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], form: Form) -> None:
    """Print ``answer`` (json) or ``rows`` (everything else) on stdout."""
    if form == "json":
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    elif form == "jsonl":
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    else:
        wanted = [c for c in columns if form in ("wide", "csv") or not c.wide]
        cells = [[text(row.get(column.key)) for column in wanted] for row in rows]
        titles = [column.title for column in wanted]
        if form == "csv":
            out = io.StringIO()
            csv.writer(out, lineterminator="\n").writerows([[c.key for c in wanted], *cells])
            print(out.getvalue(), end="")
        elif sys.stdout.isatty():
            _draw(titles, cells)
        else:
            for line in [titles, *cells]:
                print("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in line))


def text(value: Any) -> str:
    """A cell: nothing is ``-``, lists are joined, numbers are short."""
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, (list, tuple)):
        return ",".join(text(one) for one in value)
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _draw(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in [titles, *rows]) for i in range(len(titles))]
    print(paint("  ".join(title.ljust(width) for title, width in zip(titles, widths, strict=True)).rstrip(), "bold"))
    for row in rows:
        cells = [
            paint(cell, _colour(cell)) + " " * (width - len(cell)) for cell, width in zip(row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _colour(word: str) -> str:
    return next((colour for colour, words in MEANING.items() if word in words), "")


def paint(word: str, colour: str) -> str:
    """The word in its colour, on a terminal that may be coloured (NO_COLOR, TERM=dumb)."""
    code = {"bold": "1", "green": "32", "yellow": "33", "red": "31", "dim": "2"}.get(colour)
    if code is None or not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return word
    return f"\x1b[{code}m{word}\x1b[0m"


def fold_nodes(names: Sequence[str]) -> str:
    """``node[001-064],spare-1``: names that differ only in their last number, of the same width, as a range."""
    groups: dict[tuple[str, int], list[int]] = {}
    single: list[str] = []
    parts = [(name, name.rstrip("0123456789")) for name in sorted(set(names))]
    wide = {
        (head, len(name)) for name, head in parts if name[len(head) :].startswith("0") and len(name) > len(head) + 1
    }
    for name, head in parts:
        digits = name[len(head) :]
        if digits and head:
            padded = len(digits) if (head, len(name)) in wide else 0
            groups.setdefault((head, padded), []).append(int(digits))
        else:
            single.append(name)
    folded: list[str] = []
    for (head, padded), numbers in groups.items():
        ranges = [_range(low, high, padded) for low, high in _runs(sorted(numbers))]
        folded.append(f"{head}{ranges[0]}" if len(numbers) == 1 else f"{head}[{','.join(ranges)}]")
    return ",".join(sorted(folded + single)) or "-"


def _range(low: int, high: int, padded: int) -> str:
    return f"{low:0{padded}d}" if low == high else f"{low:0{padded}d}-{high:0{padded}d}"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
