"""The judge is just: names of one thing are equal, a part of a culprit is not enough, evictions are counted."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from benchmarks.diagnosis import Judged, scores
from benchmarks.diagnosis_cases import Case, gpu, innocent_node, same_cause, same_culprit, same_path, wrong_eviction
from benchmarks.diagnosis_noise import BEFORE, FAULT, FAULT_NODE, WATCHDOG, crowded, large

from keepstep.core.diagnose.result import Action, Category, Culprit, Diagnosis

CASE = Case(
    file="own",
    id="T-1",
    log="line\n",
    category="infrastructure",
    root_cause="gpu_fell_off_bus: because of that",
    culprit={"node": "n7", "gpu": "0000:3b:00|2", "rank": 58},
    transient=False,
    action="replace_node: swap n7",
    source="constructed: for this test",
)
RIGHT = Culprit(node="n7", gpu="00000000:3B:00.0", rank=58)


def said(
    category: Category, action: Action, culprit: Culprit = RIGHT, cause: str = "gpu_fell_off_bus: so"
) -> Diagnosis:
    return Diagnosis(
        category=category,
        root_cause=cause,
        summary="",
        transient=False,
        action=action,
        culprit=culprit,
        confidence=1.0,
    )


@pytest.mark.parametrize(
    "names",
    [("0000:3b:00", "0000:3B:00.0", "00000000:3b:00.0", "PCI:0000:3b:00"), ("3", "GPU3", "gpu 3", "GPU #3")],
)
def test_names_of_one_gpu_are_equal(names: tuple[str, ...]) -> None:
    assert len({gpu(name) for name in names}) == 1


def test_different_gpus_stay_different() -> None:
    assert len({gpu(name) for name in ("0000:3b:00", "0001:3b:00", "0000:3c:00", "3", "GPU13", "")}) == 6


def test_a_path_may_be_the_end_of_the_other_in_whole_components() -> None:
    assert same_path("/app/train.py", "train.py")
    assert same_path("train.py", "/app/train.py")
    assert not same_path("/app/pretrain.py", "train.py")
    assert not same_path("/app/train.py", "")


def test_a_culprit_is_right_when_all_that_is_known_is_right() -> None:
    assert same_culprit(CASE, RIGHT)
    assert same_culprit(CASE, Culprit(node="n7", gpu="GPU2", rank=58, line=3))
    for wrong in (
        Culprit(node="n8", gpu="2", rank=58),
        Culprit(node="n7", gpu="3", rank=58),
        Culprit(node="n7", gpu="2", rank=59),
        Culprit(node="n7", gpu="2"),
        Culprit(),
    ):
        assert not same_culprit(CASE, wrong)


def test_bad_data_may_be_named_as_file_or_thing_and_code_only_as_file() -> None:
    data = replace(CASE, category="data", culprit={"file": "/data/shard_7.tar"})
    named = Culprit(file="/app/data.py", line=4, thing="shard_7.tar")
    assert same_culprit(data, named)
    assert not same_culprit(replace(data, category="user_code"), named)


def test_a_cause_is_right_within_its_family() -> None:
    family = {"gpu_fell_off_bus": "gpu_lost", "pcie_dpc": "gpu_lost", "nan": "bad_batch"}
    assert same_cause(CASE, said("infrastructure", "replace_node"), family)
    assert same_cause(CASE, said("infrastructure", "replace_node", cause="pcie_dpc: so"), family)
    assert not same_cause(CASE, said("infrastructure", "replace_node", cause="nan: so"), family)
    assert not same_cause(CASE, said("infrastructure", "replace_node", cause="never_heard: so"), family)


@pytest.mark.parametrize("action", ["replace_node", "isolate_and_verify"])
@pytest.mark.parametrize("category", ["user_code", "data", "none"])
def test_an_eviction_without_a_guilty_machine_counts(category: str, action: Action) -> None:
    innocent = replace(CASE, category=category, culprit={})
    assert wrong_eviction(innocent, said("infrastructure", action))
    assert not wrong_eviction(innocent, said("infrastructure", "restart_in_place"))
    assert not wrong_eviction(CASE, said("infrastructure", action))


def test_the_eviction_of_another_node_counts() -> None:
    assert innocent_node(CASE, said("infrastructure", "replace_node", Culprit(node="n8")))
    assert not innocent_node(CASE, said("infrastructure", "replace_node"))
    assert not innocent_node(CASE, said("infrastructure", "restart_in_place", Culprit(node="n8")))


def test_an_eviction_counts_where_all_nodes_suffer_alike() -> None:
    shared = replace(CASE, culprit={}, action="retry_with_backoff: the file server is down")
    assert innocent_node(shared, said("infrastructure", "replace_node"))
    assert not innocent_node(shared, said("infrastructure", "retry_with_backoff"))
    assert not innocent_node(replace(CASE, culprit={}), said("infrastructure", "replace_node"))


def test_scores_are_shares_of_what_they_are_about() -> None:
    """Three cases, one of them without a culprit; noise changes the last verdict."""
    right = said("infrastructure", "replace_node")
    wrong = said("user_code", "stop_and_notify_user", Culprit(), "exception: so")
    nobody = replace(CASE, category="none", culprit={}, action="no_action: none")
    found = scores([Judged(CASE, right, right), Judged(CASE, wrong, wrong), Judged(nobody, right, wrong)])
    assert found["category_accuracy"] == 0.3333
    assert found["culprit_accuracy"] == 0.5
    assert found["root_cause_accuracy"] == 0.6667
    assert found["action_accuracy"] == 0.3333
    assert found["wrong_evictions"] == 1
    assert found["wrong_evictions_amid_noise"] == 0
    assert found["same_amid_noise"] == 0.6667


def test_noise_leaves_the_lines_of_a_log_whole_and_in_order() -> None:
    log = [f"case line {number}\n".encode() for number in range(50)]
    amid = list(crowded(log, Random(1)))
    assert [line for line in amid if line.startswith(b"case line")] == log
    assert len(amid) > len(log) + BEFORE
    assert not any(b"| loss" in line for line in amid[amid.index(log[0]) :])
    assert all(line.endswith(b"\n") for line in amid)


def test_a_large_log_has_its_size_and_one_fault_before_its_consequences() -> None:
    text = b"".join(large(2, Random(2))).decode()
    assert 2_000_000 <= len(text.encode()) < 4_000_000
    assert text.count("".join(FAULT)) == 1
    assert FAULT_NODE in FAULT[0]
    assert text.index(FAULT[0]) < text.index(WATCHDOG.partition("{")[0] + "0]:[E ProcessGroupNCCL")
