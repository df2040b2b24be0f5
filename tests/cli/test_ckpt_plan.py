"""``keepstep ckpt plan``: the numbers it prints, what it refuses, and that it needs nothing but itself."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from keepstep.cli.ckpt_plan_page import fold_homes
from keepstep.cli.main import main

EXAMPLE = ("--tp", "8", "--pp", "8", "--dp", "32", "--nodes", "256")


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["ckpt", "plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_example_as_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs of nodes folded, the memory with its parts, a row per tier and per loss; what was assumed is said."""
    assert main(["ckpt", "plan", *EXAMPLE, "--racks", "32"]) == 0
    page = capsys.readouterr().out
    assert "256 nodes x 8 ranks = 2048 ranks: tp 8, pp 8, dp 32; 32 racks" in page
    assert "node[000-015] <-> node[144-159]" in page
    assert "the loss of any one node or group or rack leaves a copy of everything" in page
    assert "Host memory per node: 372.5 GiB" in page
    assert "assumed: " in page
    for row in ("memory", "peer", "local", "remote", "any pipeline-parallel group", "any rack", "all memory"):
        assert f"\n  {row} " in page


def test_the_example_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """With everything said nothing is assumed, and only two buddies at once leave state without a copy."""
    rates = ("--device-gbps", "160", "--peer-gbps", "200", "--local-gbps", "40", "--remote-gbps", "20")
    found = plan(capsys, *EXAMPLE, "--rack-size", "8", "--params", "70e9", "--step-s", "4", *rates)
    assert found["schema"] == "keepstep.v1/CheckpointPlan"
    assert found["assumed"] == []
    assert found["shortfalls"] == []
    assert found["cluster"]["rank_bytes"] == 70 * 10**9 * 14 // 2048
    assert len(found["nodes"]) == 256
    assert {row["buddy"] for row in found["nodes"]} == {row["node"] for row in found["nodes"]}
    without = {row["kind"]: row["without_copy"] for row in found["losses"]}
    assert without == {"process": 0, "node": 0, "dp": 0, "pp": 0, "rack": 0, "two buddies": 2, "all memory": 256}
    assert {tier["every"] for tier in found["tiers"]} == {1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tp", "8", "--pp", "8", "--dp", "32", "--nodes", "200"), "--dp 25 or --nodes 256"),
        (("--nodes", "4", "--racks", "8"), "at most --racks 4"),
        (("--nodes", "4", "--racks", "2", "--rack-size", "2"), "leave one out"),
        (("--nodes", "0"), "--nodes 0 must be 1 or more"),
        (("--nodes", "4", "--params", "big"), "--params 'big' is no number of parameters"),
        (("--nodes", "4", "--params", "7B", "--bytes-per-rank", "1GB"), "leave one out"),
        (("--nodes", "4", "--bytes-per-rank", "12"), "12GB"),
        (("--nodes", "4", "--params", "7B", "--optimizer", "adm"), "did you mean adam"),
        (("--nodes", "4", "--params", "7B", "--dtype", "fp8"), "or say --bytes-per-rank"),
        (("--nodes", "4", "--overhead", "900%"), "--overhead '900%'"),
        (("--nodes", "4", "--mtbf", "soon"), "--mtbf 'soon'"),
        (("--nodes", "4", "--mtbf", "0"), "--mtbf '0' must be above 0"),
        (("--nodes", "4", "--mtbf=-3h"), "--mtbf '-3h' is not a duration"),
        (("--nodes", "4", "--overhead", "0"), "--overhead '0' is no share above 0%"),
        (("--nodes", "4", "--gpus-per-node", "1000000000"), "--gpus-per-node 1000000000 must be 1024 or less"),
        (("--nodes", "4", "--step-s", "1e300"), "--step-s 1e+300 must be at most 1e+06"),
        (("--nodes", "4", "--remote-gbps", "1e-300"), "--remote-gbps 1e-300 must be above 0"),
        (("--nodes", "4", "--bytes-per-rank", "0"), "--bytes-per-rank '0' is no size"),
        (("--nodes", "4", "--full-every", "100000"), "--full-every 100000 must be 200 or less"),
        (("--nodes", "4", "--step-s", "0"), "--step-s 0 must be above 0"),
        (("--nodes", "4", "--peer-gbps", "nan"), "0 leaves the tier out"),
        (("--nodes", "90000"), "more than 20000"),
    ],
)
def test_impossible_arguments_name_the_way_out(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["ckpt", "plan", *words]) == 64
    assert said in capsys.readouterr().err


def test_what_cannot_be_had_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """One FSDP group over all nodes cannot be left; an interval below the bandwidth is a warning, not a promise."""
    assert main(["ckpt", "plan", "--nodes", "3", "--dp", "24", "--every", "1", "--local-gbps", "0"]) == 0
    shown = capsys.readouterr()
    assert "shares its data-parallel group: node[0-2] (every node shares a data-parallel group with it)" in shown.out
    assert "--every 1 is more than the remote tier can take" in shown.err
    assert main(["ckpt", "plan", "--nodes", "2", "--peer-gbps", "0", "--remote-gbps", "0", "--local-gbps", "0"]) == 0
    shown = capsys.readouterr()
    assert "nowhere: starts anew" in shown.out
    assert "nothing outlives the memory" in shown.err


def test_rows_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """csv has a line per node, for other tools; wide shows them to people."""
    assert main(["ckpt", "plan", "--nodes", "2", "--rack-size", "1", "-o", "csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "node,rack,ranks,buddy,buddy_rack", "node0,rack0,0-7,node1,rack1", "node1,rack1,8-15,node0,rack0",
    ]  # fmt: skip
    assert main(["ckpt", "plan", "--nodes", "2", "-o", "wide"]) == 0
    assert "node1  -     8-15   node0" in capsys.readouterr().out


def test_homes_are_folded() -> None:
    """Runs of neighbours; a pair once; a ring as it turns; a lonely node with a word."""
    assert fold_homes([("n0", "n2"), ("n1", "n3"), ("n2", "n0"), ("n3", "n1")]) == ["n[0-1] <-> n[2-3]"]
    assert fold_homes([("n0", "n1"), ("n1", "n2"), ("n2", "n0")]) == ["n[0-1] -> n[1-2]", "n2 -> n0"]
    assert fold_homes([("n0", None)]) == ["n0 -> nowhere: there is no other node"]
    assert fold_homes([("n0", "n1"), ("n1", "n0"), ("n2", "n3"), ("n3", "n2")]) == ["n0 <-> n1", "n2 <-> n3"]


def test_needs_no_torch() -> None:
    """A laptop without torch, numpy or any extra can plan."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'obstore', 'zstandard', 'safetensors')));"
        "from keepstep.cli.main import main; sys.exit(main(['ckpt', 'plan', '--nodes', '4']))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
