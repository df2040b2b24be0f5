"""`python -m keepstep.probes`: a verdict as JSON, progress beside it, an error in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.probes.__main__ import main


def workers(folder: Path, guilty: str = "") -> str:
    path = folder / "workers.json"
    path.write_text(
        json.dumps([{"machine": f"n{at}", "environ": {"FAULT": "1"} if f"n{at}" == guilty else {}} for at in range(4)])
    )
    return str(path)


def test_verdict_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The machine, its probability and the reason; rounds and failing groups are told on the other stream."""
    words = ["--workers", workers(tmp_path, "n2"), "--record", str(tmp_path / "r"), "--rate", "1.0"]
    assert main([*words, "--", "sh", "-c", '[ -z "$FAULT" ]']) == 0
    out, err = capsys.readouterr()
    verdict = json.loads(out)
    assert (verdict["kind"], verdict["machines"]) == ("found", ["n2"])
    assert verdict["probability"][0] > 0.95
    assert "n2: exit code 1" in err


def test_used_up_budget_is_another_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workers", workers(tmp_path), "--record", str(tmp_path / "r"), "--rate", "0.1", "--rounds", "3"]
    assert main([*words, "--", "true"]) == 1
    assert json.loads(capsys.readouterr().out)["kind"] == "open"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--"], "command must have at least one word"),
        (["--unit", "3", "--", "true"], "4 machines make fewer than two groups of 3"),
        (["--rate", "1.5", "--", "true"], "a rate in (0, 1]"),
        (["--", "no-such-tool"], "no-such-tool could not be started for n"),
    ],
)
def test_errors_are_one_sentence(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--workers", workers(tmp_path), "--record", str(tmp_path / "r"), *more]) == 2
    out, err = capsys.readouterr()
    assert (out, err.strip().splitlines()[-1][:7]) == ("", "error: ")
    assert said in err


def test_unreadable_workers_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.json"
    for content in ("[{}]", "nonsense"):
        path.write_text(content)
        assert main(["--workers", str(path), "--record", str(tmp_path / "r"), "--", "true"]) == 2
    assert "error: " in capsys.readouterr().err
