"""A keeper knows which node of the roster it is, also where its directory's name could not be the node's."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint.keeper import Keeper
from keepstep.model import env


def test_the_agents_word_counts_before_the_directorys_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths that are too long for sockets are shortened by a hash: without the name no replica would ever be sent."""
    monkeypatch.delenv(env.NODE, raising=False)
    assert Keeper(tmp_path / "n0", "127.0.0.1", "")._node == "n0"
    monkeypatch.setenv(env.NODE, "n0")
    assert Keeper(tmp_path / "3f2a90c1b7de", "127.0.0.1", "")._node == "n0"
