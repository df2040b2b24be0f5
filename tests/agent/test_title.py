"""Forked processes go by names of their own: who looks at ``ps`` or ``top`` sees which rank is which."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shim_client import ShimClient

PROBE = """
import json, os, sys
from pathlib import Path
from keepstep.checkpoint import title

def seen():
    proc = Path("/proc/self")
    line, comm = (proc / "cmdline").read_bytes(), (proc / "comm").read_text().strip()
    return {"line": line.rstrip(b"\\0").decode(), "comm": comm, "environ": (proc / "environ").read_bytes().decode()}

first = seen()
title.show("rank 7", "r7", job="lm", program=sys.argv[0])  # as a standby does when it is given a rank
title_cut = "x" * 500
second = seen()
title.show(title_cut, title_cut, job="lm")
print(json.dumps([first, second, seen(), sys.argv, os.environ["MARK"]]))
"""
WORKER = {"KEEPSTEP_ROLE": "worker", "RANK": "12", "KEEPSTEP_JOB": "lm", "MARK": "m"}


@pytest.fixture
def shim(node_dir: Path) -> Iterator[ShimClient]:
    one = ShimClient(node_dir)
    yield one
    one.close()


def probe(shim: ShimClient, folder: Path, name: str, env: dict[str, str], start: str = "fork") -> list[Any]:
    script = folder / "train.py"
    script.write_text(PROBE)
    code, out, err = shim.run(name, str(script), "--lr", "1", env=env, start=start)
    assert code == 0, err
    found: list[Any] = json.loads(out)
    assert found[3:] == [[str(script), "--lr", "1"], "m"], "arguments and environment stay the program's own"
    return found


def test_a_rank_shows_its_number_and_its_job(shim: ShimClient, tmp_path: Path) -> None:
    """Command line and short name tell the rank; the environment behind them in memory is untouched."""
    first, second, cut, *_ = probe(shim, tmp_path, "a", WORKER)
    assert (first["line"], first["comm"]) == ("keepstep: rank 12 of job lm (train.py)", "keepstep-r12")
    assert (second["line"], second["comm"]) == ("keepstep: rank 7 of job lm (train.py)", "keepstep-r7")
    assert cut["line"].startswith("keepstep: xxx")
    assert len(cut["line"]) < 500
    assert cut["comm"] == "keepstep-xxxxxx"
    assert first["environ"] == second["environ"] == cut["environ"]
    assert "PATH=" in cut["environ"]


def test_standbys_and_helpers_have_names_too(shim: ShimClient, tmp_path: Path) -> None:
    """A process without a rank goes by the name that the agent has given it."""
    standby = {**WORKER, "KEEPSTEP_ROLE": "standby"}
    assert probe(shim, tmp_path, "s4", standby)[0]["line"] == "keepstep: standby s4 of job lm (train.py)"
    helper = probe(shim, tmp_path, "store2", {"KEEPSTEP_JOB": "lm", "MARK": "m", "KEEPSTEP_ROLE": ""})[0]
    assert (helper["line"], helper["comm"]) == ("keepstep: store2 of job lm", "keepstep-store2")


def test_a_command_line_that_a_user_has_written_stays(shim: ShimClient, tmp_path: Path) -> None:
    """What was executed and not forked is found by its own words, whatever it is told later."""
    first, second, *_ = probe(shim, tmp_path, "a", WORKER, start="spawn")
    assert first == second
    assert first["line"].endswith("\0--lr\x001")
    assert "keepstep" not in first["comm"]
