"""`keepstep sdc` and `keepstep selftest` at the terminal: the real API and mind behind them, a real child process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decide_rig import serving, write_log
from tests.core.fleet import Fleet, running

from keepstep.cli import dirs
from keepstep.cli.main import main
from keepstep.model.facts import GuardNoted
from keepstep.model.ids import NodeId, Rank
from keepstep.model.settings import Policy

PROBES = Path(__file__).parents[1] / "probes"


def struck() -> Fleet:
    """Rank 2's replica has differed, and come out well when the steps were done again."""
    fleet = running(standby_nodes=1, policy=Policy(mode="assist", approve_s=4e9, sdc_window_s=4e9))
    for what, more in (
        ("replicas", {"since": 8, "tensor": "p/m/w"}),
        ("rolled_back", {"since": 8}),
        ("judged", {"verdict": "transient", "others": (Rank(0), Rank(1), Rank(3))}),
    ):
        why = "rank 2 differs; training goes back to step 8"
        fleet.say(NodeId("n0"), GuardNoted, what=what, step=11, ranks=(Rank(2),), why=why, **more)
    fleet.pump()
    return fleet


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(struck(), tmp_path / "log.sqlite") as address:
        monkeypatch.setenv("KEEPSTEP_CONTROLLER_URL", address)
        yield address


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = told(capsys, *words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.usefixtures("server")
def test_what_is_investigated_is_listed_with_its_history(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = answered(capsys, "sdc", "ls")["investigations"]
    assert (row["id"], row["state"], row["open"], row["ranks"], row["nodes"]) == ("lm-sdc1", "SOAK", True, "2", ["n1"])
    assert (row["step"], row["clean_step"], row["incident"]) == (11, 8, "lm-i1")
    assert row["next"] == ["CONFIRMED", "CLEARED"]
    code, out, _ = told(capsys, "sdc", "ls", "--history")
    assert code == 0
    for word in ("lm-sdc1", "SUSPECTED: rank 2 differs", "VOTE:", "SOAK: self-test of n1"):
        assert word in out, out


@pytest.mark.usefixtures("server")
def test_a_person_confirms_and_the_node_is_proposed_for_eviction(capsys: pytest.CaptureFixture[str]) -> None:
    """In mode assist it waits for an approval; the words say what became of it."""
    code, _, err = told(capsys, "sdc", "close", "3", "--confirmed", "--cleared")
    assert code == 64
    assert "either --confirmed or --cleared" in err
    answer = answered(capsys, "sdc", "close", "sdc1", "--confirmed", "--why", "burn-in failed")
    assert any("lm-sdc1 CONFIRMED" in line for line in answer["answer"])
    assert any("evict n1 PROPOSED" in line for line in answer["answer"])
    (row,) = answered(capsys, "proposals")["proposals"]
    assert (row["kind"], row["nodes"], row["incident"]) == ("evict", ["n1"], "lm-i1")


@pytest.mark.usefixtures("server")
def test_a_person_opens_steps_and_clears(capsys: pytest.CaptureFixture[str]) -> None:
    opened = answered(capsys, "sdc", "open", "lm", "--rank", "0", "--why", "odd loss")
    assert any("lm-sdc2 rank 0 SUSPECTED: odd loss" in line for line in opened["answer"])
    answered(capsys, "sdc", "step", "2", "vote", "--why", "compared by hand")
    code, _, err = told(capsys, "sdc", "step", "2", "suspected", "--why", "again")
    assert code != 0
    assert "lm-sdc2 is VOTE; from there it goes to SOAK, CONFIRMED, CLEARED" in err
    answered(capsys, "sdc", "close", "lm-sdc2", "--cleared")
    states = {row["id"]: row["state"] for row in answered(capsys, "sdc", "ls")["investigations"]}
    assert states == {"lm-sdc1": "SOAK", "lm-sdc2": "CLEARED"}


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("open", "lm", "--rank", "9", "--why", "x"), "there is no rank 9; the world has 4 ranks"),
        (("step", "7", "SOAK", "--why", "x"), "there is no investigation lm-sdc7"),
        (("close", "i1", "--cleared"), "names no investigation"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_written(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    code, _, err = told(capsys, "sdc", *words)
    assert code != 0
    assert why in err


@pytest.mark.usefixtures("server")
def test_the_incident_page_tells_the_whole_story(capsys: pytest.CaptureFixture[str]) -> None:
    """Also what happened after the incident was closed."""
    code, out, _ = told(capsys, "incident", "lm-i1")
    assert code == 0
    for word in ("silent data corruption", "rank 2", "p/m/w", "lm-sdc1 SUSPECTED", "lm-sdc1 SOAK"):
        assert word in out, out


def test_without_a_controller_the_log_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEPSTEP_STATE_DIR", str(tmp_path))
    write_log(struck(), dirs.runs(tmp_path) / "lm")
    (row,) = answered(capsys, "sdc", "ls", "lm")["investigations"]
    assert row["state"] == "SOAK"
    code, _, err = told(capsys, "sdc", "close", "lm-sdc1", "--cleared")
    assert code != 0
    assert "nothing can be ordered" in err


def test_this_machine_is_examined(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """0 where all is right; 1 with the core where it is not."""
    pytest.importorskip("torch")
    report = answered(capsys, "selftest", "--test", "gemm", "--seconds", "0.01")
    assert (report["schema"], report["passed"], report["rounds"]) == ("keepstep.v1/SelfTest", True, 1)
    monkeypatch.setenv("KEEPSTEP_SELFTEST_MULTIPLY", "double_multiply_torch:nothing")
    monkeypatch.setenv("PYTHONPATH", str(PROBES))
    code, out, _ = told(capsys, "selftest", "--test", "gemm", "--seconds", "0.01")
    assert code == 1
    assert "FAILED" in out
    assert "256 rows and 256 columns are wrong" in out
