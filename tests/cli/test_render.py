"""Output forms: the same rows as table, TSV, JSON, JSON lines and CSV."""

from __future__ import annotations

import csv
import io
import json
import random

import pytest

from keepstep.cli.errors import UsageError
from keepstep.cli.merge import Merged, merge, prefix
from keepstep.cli.render import Column, check_form, fold_nodes, show

COLUMNS = (Column("JOB", "job"), Column("STATE", "state"), Column("SLOT", "slot", wide=True))
ROWS = [{"job": "a", "state": "RUNNING", "slot": "s\t0"}, {"job": "bb", "state": None, "slot": ""}]
ANSWER = {"schema": "keepstep.v1/JobList", "jobs": ROWS}


def shown(capsys: pytest.CaptureFixture[str], form: str) -> str:
    show(ANSWER, ROWS, COLUMNS, check_form(form))
    return capsys.readouterr().out


def test_without_a_terminal_a_table_is_tab_separated(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts get one line per row, no colour, no padding; tabs in values cannot break a row."""
    assert shown(capsys, "table") == "JOB\tSTATE\na\tRUNNING\nbb\t-\n"
    assert shown(capsys, "wide").splitlines()[1] == "a\tRUNNING\ts 0"


def test_on_a_terminal_columns_line_up_and_no_color_is_obeyed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding is counted without colour codes; NO_COLOR leaves none."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mRUNNING\x1b[0m" in shown(capsys, "table")
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(capsys, "table") == "JOB  STATE\na    RUNNING\nbb   -\n"


def test_json_is_the_whole_answer_with_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """``-o json`` can be parsed and names its schema; ``jsonl`` is one row per line, ``csv`` all columns."""
    assert json.loads(shown(capsys, "json")) == ANSWER
    assert [json.loads(line) for line in shown(capsys, "jsonl").splitlines()] == ROWS
    rows = list(csv.reader(io.StringIO(shown(capsys, "csv"))))
    assert rows == [["job", "state", "slot"], ["a", "RUNNING", "s\t0"], ["bb", "-", "-"]]


def test_an_unknown_form_is_refused_with_a_suggestion() -> None:
    """A typo in -o names the form that was meant."""
    with pytest.raises(UsageError) as caught:
        check_form("jsn")
    assert "did you mean json?" in caught.value.paragraph()


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["node001", "node002", "node003", "node010"], "node[001-003,010]"),
        (["n-0", "n-1", "spare"], "n-[0-1],spare"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n01", "n1"], "n01,n1"),
        (["n098", "n099", "n100"], "n[098-100]"),
        (["17"], "17"),
        ([], "-"),
    ],
)
def test_node_names_are_folded(names: list[str], folded: str) -> None:
    """Ranges keep leading zeros apart, and nothing is lost or invented."""
    assert fold_nodes(names) == folded


def test_equal_lines_of_ranks_are_folded() -> None:
    """What all ranks say is one line; what one rank says alone does not stop the others from being folded."""
    outputs = {0: ["start", "epoch 1", "loss 3", "end"], 1: ["start", "loss 3", "end"], 2: ["start", "loss 4", "end"]}
    assert list(merge(outputs)) == [
        Merged((0, 1, 2), "start"),
        Merged((0,), "epoch 1"),
        Merged((0, 1), "loss 3"),
        Merged((2,), "loss 4"),
        Merged((0, 1, 2), "end"),
    ]


def test_merging_loses_and_reorders_nothing() -> None:
    """For random outputs, each rank's lines come out complete and in order."""
    seed = 20260807
    print(f"seed {seed}")
    luck = random.Random(seed)
    for _ in range(50):
        outputs = {
            rank: [luck.choice("abcde") for _ in range(luck.randrange(200))] for rank in range(luck.randrange(1, 6))
        }
        merged = list(merge(outputs, window=luck.randrange(1, 20)))
        for rank, lines in outputs.items():
            assert [one.line for one in merged if rank in one.ranks] == lines


def test_prefixes() -> None:
    """One rank is named with its node, several by their range."""
    assert prefix((3,), {3: "node-1"}) == "node-1:r3"
    assert prefix((0, 1, 2, 5), {}) == "[r0-2,5]"
