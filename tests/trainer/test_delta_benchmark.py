"""The benchmark of differences says what it promises, at a size that takes a moment."""

from __future__ import annotations

import json
import sys

import pytest
from benchmarks import delta

KEYS = {"full_bytes", "delta_bytes", "delta_ratio", "replay_bytes", "replay_ratio", "encode_mb_s", "decode_mb_s"}


def test_both_ways_are_measured_and_exact(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A real training of a tiny model: every approach restores the live bits through a chain of ten."""
    words = ["--json", "--width", "16", "--layers", "1", "--batch", "2", "--warm-up", "2", "--steps", "1", "--far", "0"]
    monkeypatch.setattr(sys, "argv", ["delta", *words])
    assert delta.main() == 0
    found = json.loads(capsys.readouterr().out)
    for dtype in ("float32", "bfloat16", "mixed"):
        row = found[dtype]
        assert row.keys() >= KEYS
        assert row["exact_delta"] is True
        assert row["exact_replay"] is True
        assert row["chain"] == 10
        assert 0 < row["delta_bytes"] < row["full_bytes"]
        assert row["replay_bytes"] > 0
        assert row["delta_ratio_min"] <= row["delta_ratio"] <= row["delta_ratio_max"]
        assert set(row["by_lr"]) == {"0.0001", "1e-05"}
    kinds, count = found["mixed"]["full_bytes_by_kind"], found["parameters"]
    assert {kind: size // count for kind, size in kinds.items()} == {
        "weights": 2,
        "exp_avg": 4,
        "exp_avg_sq": 4,
        "step": 0,
        "master": 4,
    }
    whole, without = found["mixed"], found["mixed"]["without_master"]
    assert whole["full_bytes"] - without["full_bytes"] == kinds["master"]
    assert 0 < without["delta_bytes"] < whole["delta_bytes"]
