"""Rules are data, so their samples are their tests."""

from __future__ import annotations

import re

import pytest

from keepstep.core.diagnose.explain import explain
from keepstep.core.diagnose.observe import observe
from keepstep.core.diagnose.rule import Rule, compiled
from keepstep.core.diagnose.rules import RULES, SCANNED, candidates
from keepstep.core.diagnose.scan import Scanner, shape
from keepstep.core.diagnose.xid import coded_rule
from keepstep.core.diagnose.xid_table import SXIDS, XIDS

SAMPLES = [pytest.param(rule, sample, id=f"{rule.id}-{i}") for rule in RULES for i, sample in enumerate(rule.samples)]


@pytest.mark.parametrize(("rule", "sample"), SAMPLES)
def test_a_sample_is_found_by_its_own_rule_and_no_stronger_one(rule: Rule, sample: str) -> None:
    assert compiled(rule).search(sample), "the pattern does not match its own sample"
    assert rule in candidates(shape(sample.encode())), f"none of the words {rule.words} is in the sample"
    if rule.role == "context":
        return
    log = observe([sample.encode()])
    assert rule.id in log.findings, f"only {sorted(log.findings)} was found"
    stronger = [
        found[0].rule.id
        for found in log.findings.values()
        if found[0].rule.role in ("initiating", "symptom") and found[0].rule.weight > rule.weight
    ]
    assert not stronger or rule.role in ("cascade", "teardown"), f"{stronger} would be believed instead"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_is_whole(rule: Rule) -> None:
    assert rule.samples, "no sample"
    assert rule.source, "no source"
    assert re.fullmatch(r"[a-z][a-z_]+", rule.id)
    assert 0 <= rule.weight <= 1
    assert not any(re.search(r"\d|[A-Z]", word) for word in rule.words), (
        "digits and capitals are gone when words are looked for"
    )
    if rule.action in ("replace_node", "isolate_and_verify"):
        assert rule.category == "infrastructure"


def test_the_names_of_rules_are_unique() -> None:
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.role != "context"], ids=lambda rule: rule.id)
def test_the_scanner_stops_at_every_sample(rule: Rule) -> None:
    """A line is only judged when the fast search has let it through, wherever it stands in a long log."""
    filler = [b"plain text %d" % i for i in range(120)]
    for sample in rule.samples:
        scanner = Scanner(SCANNED)
        lines = b"\n".join([*filler, sample.encode(), *filler])
        seen = [raw.number for raw in scanner.feed(lines)] + [raw.number for raw in scanner.finish()]
        assert len(filler) + 1 in seen, f"none of the words of {rule.id} was found"


def test_every_code_of_the_catalogues_has_a_meaning() -> None:
    for code in XIDS:
        found = coded_rule(f"NVRM: Xid (PCI:0000:04:00): {code}, pid=1, name=x, text")
        assert found is not None
        assert found[0].says.startswith(f"Xid {code} (")
        assert found[1] == "0000:04:00"
    for code in SXIDS:
        found = coded_rule(f"nvidia-nvswitch0: SXid (PCI:0000:05:00.0): {code}, Fatal, Link 62 text")
        assert found is not None
        assert found[0].id == "nvswitch_fatal"


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 92, 94])
def test_codes_that_are_no_reason_to_throw_a_machine_out(code: int) -> None:
    said = explain([b"n1 kernel: NVRM: Xid (PCI:0000:04:00): %d, pid=1, name=python, text\n" % code])
    assert said.action != "replace_node"


@pytest.mark.parametrize("code", [48, 64, 74, 79, 95, 119, 140])
def test_codes_of_broken_hardware(code: int) -> None:
    said = explain([b"node-12 kernel: NVRM: Xid (PCI:0000:04:00): %d, pid=1, name=python, text\n" % code])
    assert (said.category, said.action, said.culprit.node) == ("infrastructure", "replace_node", "node-12")


def test_a_switch_notice_that_says_non_fatal_is_none() -> None:
    said = explain(
        [b"nvidia-nvswitch1: SXid (PCI:0000:c5:00.0): 12028, Non-fatal, Link 32 egress (First)\nstep 3 loss 2.1\n"]
    )
    assert said.category == "none"
