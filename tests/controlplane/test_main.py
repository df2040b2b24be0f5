"""What is refused before anything starts: one paragraph, the right code, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.controlplane import main as main_module
from keepstep.controlplane.main import main


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (None, 65, "cannot read the configuration"),
        ("{", 65, "is not a controller's configuration"),
        ('{"run_dir": "RUN", "hots": "x"}', 65, "unknown field `hots`"),
        ('{"host": "x"}', 65, "missing required field `run_dir`"),
        ('{"run_dir": "RUN", "agent_port": 70000}', 65, "agent_port (70000) must be between 0 and 65535"),
        ('{"run_dir": "RUN", "agent_port": 9, "http_port": 9}', 65, "are both 9; give them different ones"),
        ('{"run_dir": "RUN", "heartbeat_s": 11}', 65, "heartbeat_s (11.0) must be above 0 and below policy.lease_s"),
        ('{"run_dir": "RUN", "heartbeat_s": 0}', 65, "heartbeat_s (0.0) must be above 0"),
        ('{"run_dir": "RUN", "host": "n7"}', 66, "host n7 can be reached from other machines, so a token is needed"),
        ('{"run_dir": "RUN", "token_file": "/nope"}', 66, "cannot read the token file /nope"),
        ('{"run_dir": "/proc/nope"}', 66, "cannot make the run directory /proc/nope"),
    ],
)
def test_bad_configurations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, code: int, words: str
) -> None:
    """The message names the field and the value; the run directory is not even made."""
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text.replace("RUN", str(tmp_path / "run")))
    assert main(["--config", str(path)]) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert words in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_token_file_is_read_only_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A huge or binary file named by mistake is neither loaded nor printed."""
    token = tmp_path / "token"
    token.write_bytes(b"\xff" * (main_module.TOKEN_LIMIT * 2))
    path = tmp_path / "config.json"
    path.write_text(f'{{"run_dir": "{tmp_path / "run"}", "token_file": "{token}"}}')
    assert main(["--config", str(path)]) == 66
    assert "cannot read the token file" in capsys.readouterr().err
