"""What a script asks of the checkpoint engine: arguments before variables, and a name that is the training's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.checkpoint.exceptions import BadSetting
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Layout
from keepstep.trainer import options
from keepstep.trainer.options import Checkpoint, settle, wanted


def test_nothing_asked_is_level_0() -> None:
    """Only a KEEPSTEP_CKPT_ variable with a value (or an argument) asks for checkpoints."""
    assert not wanted({"KEEPSTEP_SNAPSHOT_EVERY": "1", "KEEPSTEP_CKPT_DIR": ""})
    assert wanted({"KEEPSTEP_CKPT_DIR": "/x"})


def test_arguments_beat_variables() -> None:
    """What the script says counts; what it leaves out comes from the environment, then from the defaults."""
    environ = {"KEEPSTEP_CKPT_DIR": "/a", "KEEPSTEP_CKPT_EVERY": "50", "KEEPSTEP_CKPT_OVERHEAD": "2%"}
    config, linger = settle(Checkpoint(every=7, keep_for="1h", layout="tp=2"), environ, 4)
    assert config.policy == CheckpointPolicy(dir="/a", every=7, overhead=0.02, keep_s=3600.0)
    assert config.layout == Layout(tp=2, dp=2)
    assert (config.level, config.snapshot_every, linger) == (1, 1, options.LINGER_S)


@pytest.mark.parametrize(
    ("asked", "environ", "words"),
    [
        (Checkpoint(every=0), {}, r"Checkpoint\(every=...\) 0 must be 1 or more"),
        (Checkpoint(dir="s4://x/y"), {}, r"Checkpoint\(dir=...\) 's4://x/y': there is no s4://"),
        (Checkpoint(), {"KEEPSTEP_CKPT_EVERY": "often"}, "KEEPSTEP_CKPT_EVERY 'often' is not a whole number"),
        (Checkpoint(), {"KEEPSTEP_CKPT_RATE_PEER": "fast"}, "KEEPSTEP_CKPT_RATE_PEER 'fast' is not a rate"),
        (Checkpoint(), {"KEEPSTEP_LINGER_S": "-1"}, "KEEPSTEP_LINGER_S '-1' is not a number of seconds"),
        (Checkpoint(snapshot_every=0), {}, "snapshot_every 0 must be 1 or more"),
        (Checkpoint(layout="tp=3"), {}, "does not make the 4 ranks"),
    ],
)
def test_what_cannot_be_meant_names_where_it_was_said(asked: Checkpoint, environ: dict[str, str], words: str) -> None:
    """The error names the argument or the variable, the value and the way out."""
    with pytest.raises(BadSetting, match=words):
        settle(asked, environ, 4)


class TestName:
    """Memory of another training must never be taken for one's own."""

    def job(self, asked: Checkpoint, **environ: str) -> str:
        return settle(asked, environ, 1)[0].job

    def test_generations_name_the_training(self) -> None:
        """The same directory is the same training, whoever starts it."""
        one, other = self.job(Checkpoint(dir="/a")), self.job(Checkpoint(dir="/b"))
        assert one == self.job(Checkpoint(), KEEPSTEP_CKPT_DIR="/a", TORCHELASTIC_RUN_ID="xyz")
        assert one != other

    def test_a_run_without_a_place_is_known_by_its_torchrun(self) -> None:
        """Restarts by one torchrun share a name; torchrun's id where it has one, else the process itself."""
        assert self.job(Checkpoint(), TORCHELASTIC_RUN_ID="xyz") == "xyz"
        elastic = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}
        assert self.job(Checkpoint(), **elastic) == self.job(Checkpoint(), **elastic)
        assert self.job(Checkpoint(), **elastic) != self.job(Checkpoint())

    def test_a_run_that_shall_not_resume_takes_nothing_of_an_earlier_one(self) -> None:
        """Its name is that of a run without a place, so that the memory of the last one is not found."""
        elastic = {"TORCHELASTIC_RESTART_COUNT": "0"}
        assert self.job(Checkpoint(dir="/a", resume=False), **elastic) != self.job(Checkpoint(dir="/a"), **elastic)

    def test_names_fit_into_paths(self) -> None:
        """The last part of the directory is the node's name, and no name makes a path too long or leaves it."""
        where = options.node_dir(Path("/r"), "../" * 50 + "x", options.node_name({"KEEPSTEP_NODE_NAME": "a/b" * 99}))
        assert where.parent.parent == Path("/r")
        assert len(where.name) <= options.MAX_NAME
        assert options.node_name({"KEEPSTEP_NODE_NAME": "n1"}) == "n1"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("KEEPSTEP_CKPT_EVERY", "often", "KEEPSTEP_CKPT_EVERY"),
        ("KEEPSTEP_CKPT_DIR", "gopher://there", "gopher"),
        ("KEEPSTEP_CKPT_DIR", "/dev/null", "/dev/null"),
    ],
)
def test_a_wrong_environment_is_refused_in_a_sentence(tmp_path: Path, name: str, value: str, says: str) -> None:
    """Before the run, with the code for a wrong configuration, and without a traceback."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
    environ |= {"KEEPSTEP_RUNTIME_DIR": str(tmp_path / "r"), "KEEPSTEP_CKPT_DIR": str(tmp_path / "c"), name: value}
    done = subprocess.run(
        [sys.executable, "-c", "import keepstep; keepstep.init()"],
        env=environ, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 65, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
