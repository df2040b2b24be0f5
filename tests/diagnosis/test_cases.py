"""The labelled logs are what they claim to be: whole, different from each other, and each with a culprit that its log
really names."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from typing import get_args

import pytest
from benchmarks.diagnosis_cases import (
    CATEGORIES,
    EITHER,
    FIELDS,
    FILES,
    FOLDER,
    cases,
    families,
    head,
    raw_lines,
)

from keepstep.core.diagnose.result import Action

KEYS = {
    "id",
    "log",
    "truth_category",
    "truth_root_cause",
    "truth_culprit",
    "transient",
    "recommended_action",
    "source",
}
ACTIONS = set(get_args(Action))
LEAST = {"published": 38, "own": 120, "heldout": 44, "heldout2": 60}
SHARE = {"infrastructure": 0.4, "user_code": 0.25, "data": 0.15, "transient": 0.1, "none": 0.1}
TOLERANCE = 0.06
SHINGLE = 4
"""Words."""
ORDINARY = 3
"""A line that, its numbers aside, stands in more logs than this is what everybody's log has."""
ALIKE = 0.7
"""Of the smaller log's shingles; above it two logs are one."""
EVERY = cases()


@pytest.mark.parametrize("name", FILES)
def test_every_case_has_every_field_in_the_right_form(name: str) -> None:
    for line in raw_lines(name):
        fields = json.loads(line)
        assert set(fields) == KEYS, fields["id"]
        assert fields["truth_category"] in CATEGORIES, fields["id"]
        assert isinstance(fields["transient"], bool), fields["id"]
        assert head(fields["recommended_action"]) in ACTIONS, fields["id"]
        assert tuple(fields["truth_culprit"]) == FIELDS, fields["id"]
        for key, value in fields["truth_culprit"].items():
            assert value is None or isinstance(value, int if key in ("rank", "line") else str), fields["id"]


def test_ids_are_unique_and_there_are_enough_of_each_file() -> None:
    assert len({case.id for case in EVERY}) == len(EVERY)
    found = Counter(case.file for case in EVERY)
    assert {name: found[name] >= least for name, least in LEAST.items()} == dict.fromkeys(LEAST, True)


def test_own_cases_are_spread_over_the_categories_as_faults_are() -> None:
    own = [case.category for case in EVERY if case.file != "published"]
    for category, share in SHARE.items():
        assert abs(own.count(category) / len(own) - share) <= TOLERANCE, category


def test_root_cause_and_source_are_given() -> None:
    for case in EVERY:
        name, colon, sentence = case.root_cause.partition(": ")
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), case.id
        assert colon, case.id
        assert len(sentence) > 20, case.id
        if case.file == "published":
            assert case.source, case.id
        else:
            assert case.source.startswith(("https://", "constructed: ")), case.id
            assert len(case.source) > 20, case.id


def test_the_culprit_stands_in_the_log() -> None:
    for case in EVERY:
        for key, value in case.culprit.items():
            if isinstance(value, int):
                assert re.search(rf"(?<!\d){value}(?!\d)", case.log), (case.id, key)
            else:
                assert any(one in case.log for one in value.split(EITHER)), (case.id, key)


def test_nobody_is_to_be_evicted_where_no_machine_is_to_blame() -> None:
    """The label itself must not ask for what the benchmark calls a wrong eviction."""
    for case in EVERY:
        if case.category in ("user_code", "data", "none"):
            assert head(case.action) not in ("replace_node", "isolate_and_verify", "restart_in_place"), case.id
            assert "node" not in case.culprit, case.id
            assert "gpu" not in case.culprit, case.id


def test_no_two_logs_are_nearly_the_same() -> None:
    """Compares four-word shingles of what is not in every other log, numbers aside."""
    kinds = [{re.sub(r"\d+", "#", line).strip() for line in re.split(r"[\r\n]+", case.log)} for case in EVERY]
    known = Counter(itertools.chain.from_iterable(kinds))
    marks = [shingles(sorted(line for line in lines if known[line] <= ORDINARY)) for lines in kinds]
    for (one, mine), (other, theirs) in itertools.combinations(zip(EVERY, marks, strict=True), 2):
        assert mine, one.id
        if {one.file, other.file} == {"published", "heldout2"}:
            continue  # Whoever wrote the second could not know which public reports the first was made of.
        assert len(mine & theirs) / min(len(mine), len(theirs)) <= ALIKE, (one.id, other.id)


def shingles(lines: list[str]) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    for line in lines:
        words = line.split()
        found |= {tuple(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1))}
    return found


def test_every_root_cause_belongs_to_one_family() -> None:
    table = json.loads((FOLDER / "families.json").read_text(encoding="utf-8"))
    ids = list(itertools.chain.from_iterable(table.values()))
    assert len(ids) == len(set(ids))
    assert {head(case.root_cause) for case in EVERY} <= set(families())
