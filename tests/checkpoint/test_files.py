"""Small files are replaced as a whole, and a failure leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.checkpoint.files import write_atomic


@pytest.mark.parametrize("durable", [False, True])
def test_a_failed_replacement_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """The last act fails: whoever reads still sees what was there, and no half-made file stays beside it."""
    path = tmp_path / "controller.json"
    write_atomic(path, b"old", durable=durable)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new", durable=durable)
    assert [found.name for found in tmp_path.iterdir()] == ["controller.json"]
    assert path.read_bytes() == b"old"
