"""A real job in mode assist: a node under suspicion stays until a person says yes, comes back, and freeze holds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.acceptance.checks import REFERENCE_STEPS, MakeCluster, assert_log_folds_to_one_state

from keepstep.cli.main import main

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]

LIMIT_S = 60.0
FAULTS = 3
"""``node_faults_to_suspect``."""


def test_a_person_approves_undoes_and_freezes(make_cluster: MakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Three faults of one node lead to a proposal and no more; the approval moves its ranks and keeps the survivors;
    undone, the node is a spare again; and in a frozen job a dead rank is replaced like in any other."""
    cluster = make_cluster(
        args=("--steps", str(REFERENCE_STEPS * 100), "--pace", "0.02"), nodes=2, standby_nodes=1, nproc=1,
        flags=("--standbys", "1", "--mode", "assist"),
    )  # fmt: skip
    state = cluster.run_dir.parent.parent

    def ask(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        code = main([*words, "--json", "--state-dir", str(state)])
        out, err = capsys.readouterr()
        assert code == 0, err
        answer: dict[str, Any] = json.loads(out)
        return answer

    def go_on(what: str) -> None:
        cluster.until(cluster.watch.settled, LIMIT_S, f"calm after {what}")
        top = max(cluster.steps().values())
        cluster.until(lambda: cluster.floor() > top + 5, LIMIT_S, f"training after {what}")

    cluster.start()
    cluster.until(cluster.watch.settled, LIMIT_S, "the job to start")
    cluster.until(lambda: cluster.watch.standbys_on("spare-0") == 1, LIMIT_S, "a standby on the spare node")
    for number in range(FAULTS):
        cluster.until(lambda: cluster.watch.standbys_on("node-1") == 1, LIMIT_S, "a standby beside the rank")
        cluster.kill_rank(1)
        cluster.until(lambda n=number: len(cluster.watch.incidents) > n, LIMIT_S, "the incident")
        go_on(f"fault {number + 1}")
    assert cluster.node_of(1) == "node-1", "nobody has said yes"
    (one,) = ask("proposals")["proposals"]
    assert (one["state"], one["nodes"], one["held"]) == ("PROPOSED", ["node-1"], "mode assist: waits for a person")
    survivor = cluster.pid_of(0)

    assert ask("approve", "p1", "--yes")["already"] is False
    cluster.until(lambda: cluster.node_of(1) == "spare-0", LIMIT_S, "the rank on the spare node")
    go_on("the swap")
    assert cluster.pid_of(0) == survivor
    assert ask("approve", "p1", "--yes")["already"] is True
    assert ask("job")["automation"]["evicted"] == ["node-1"]

    ask("undo", "node-1", "--yes")
    assert ask("proposals", "--all")["proposals"][0]["state"] == "UNDONE"
    ask("freeze", "--why", "maintenance")
    cluster.until(lambda: cluster.watch.standbys_on("node-1") == 1, LIMIT_S, "a standby on the node that came back")
    cluster.lose_node("spare-0")
    cluster.until(lambda: cluster.node_of(1) == "node-1", LIMIT_S, "the lost rank on the node that came back")
    go_on("the loss in a frozen job")
    assert ask("job")["automation"]["mode"] == "frozen"
    incident = ask("incidents")["incidents"][-1]["id"]
    trace = cluster.run_dir / "trace.json"
    assert main(["incident", incident, "--trace", str(trace), "--state-dir", str(state)]) == 0
    assert {"node node-1", "node spare-0"} <= {
        event["args"]["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert not cluster.close()
    assert_log_folds_to_one_state(cluster.run_dir)
