"""The self-test of a node: right results on a sound machine, and the core named where one multiplies wrongly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.probes import memory, selftest
from keepstep.probes.gemm import CASES, Case, entry, locate
from keepstep.probes.selftest import Pause, Report

HERE = Path(__file__).parent
CORES = sorted(os.sched_getaffinity(0))
pytest.importorskip("torch")


def examined(double: str = "", *, seed: int = 3, code: int = 0, **words: Any) -> Report:
    """As the agent does it: a process of its own."""
    flags = {"test": "gemm", "seconds": 0, **words}
    environ = {**os.environ, "PYTHONPATH": str(HERE)}
    if double:
        environ["KEEPSTEP_SELFTEST_MULTIPLY"] = f"double_multiply_torch:{double}"
    command = [sys.executable, "-m", "keepstep.probes.selftest", "--seed", str(seed)]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return msgspec.json.decode(done.stdout, type=Report)


def test_a_sound_machine_passes_with_equal_digests_for_equal_seeds() -> None:
    """All cores, one round at least; another seed is other work."""
    first, again, other = examined(), examined(), examined(seed=4)
    assert first.passed is True
    assert first.rounds == 1
    assert [name for name in first.devices if name.startswith("core")] == [f"core {core}" for core in CORES]
    assert first.digest == again.digest != other.digest
    assert first.failed == ()


def test_a_core_that_multiplies_wrongly_is_named_with_the_element() -> None:
    report = examined("one_bit", code=1)
    assert report.passed is False
    assert report.failed[0] == f"gemm float32 256x256x256 on core {CORES[-1]}: row 17, column 4 is off by 1024"
    assert all(f"core {CORES[-1]}:" in line for line in report.failed), "the other cores are right"


@pytest.mark.parametrize(
    ("double", "words"),
    [("nothing", "256 rows and 256 columns are wrong"), ("not_a_number", "rows"), ("half_more", ": not whole numbers")],
)
def test_every_kind_of_wrong_result_is_seen(double: str, words: str) -> None:
    """Zeros, NaN, and fractions that a comparison of whole sums alone would not see."""
    report = examined(double, code=1)
    assert any(words in line for line in report.failed), report.failed


def test_no_case_can_be_rounded() -> None:
    """Else a sound machine would fail; each kind's limit is respected with the largest sums there can be."""
    assert all(case.exact for case in CASES)
    assert not Case("float32", 4, 256, 4, 2047).exact


def test_blocks_are_the_same_numbers_as_one_by_one() -> None:
    """The fast way to make a matrix and the plain one agree, also where 64 bits wrap around."""
    from keepstep.probes.gemm_torch import _entries

    for seed, most in ((0, 8), (7, 2047), (2**31, 32767)):
        block = _entries(seed, 5, 7, most)
        assert block.flatten().tolist() == [entry(seed, place, most) for place in range(35)]
        assert block.abs().max() <= most


def test_expected_sums_come_from_another_way() -> None:
    """A product in exact Python integers has the sums that a real product is checked against."""
    from keepstep.probes.gemm_torch import Product

    case = Case("float32", 3, 4, 5, 8)
    product = Product(case, 11)
    a = [[entry(22, row * 4 + k, 8) for k in range(4)] for row in range(3)]
    b = [[entry(23, k * 5 + col, 8) for col in range(5)] for k in range(4)]
    whole = [[sum(a[r][k] * b[k][c] for k in range(4)) for c in range(5)] for r in range(3)]
    assert product._rows.tolist() == [sum(row) for row in whole]
    assert product._cols.tolist() == [sum(row[c] for row in whole) for c in range(5)]


def test_many_wrong_elements_are_counted_and_not_guessed() -> None:
    case = CASES[0]
    found = locate(case, {3: 5, 9: -5}, {1: 5, 2: -5})
    assert found is not None
    assert (found.row, found.rows, found.cols) == (-1, 2, 2)
    assert locate(case, {}, {}) is None


def test_an_accelerator_is_examined_like_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pretended devices beside the cores: each is named, and gets its own copy of the factors."""
    import torch

    from keepstep.probes import gemm_torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    named = gemm_torch.devices()
    assert [(one.name, one.core) for one in named[-2:]] == [("cuda:0", None), ("cuda:1", None)]
    product = gemm_torch.Product(CASES[1], 5)
    meta = gemm_torch.Device("cuda:0", torch.device("cpu", 0))
    wrong, digest = product.run(meta, torch.matmul)
    assert wrong is None
    assert torch.device("cpu", 0) in product._factors
    assert product.run(gemm_torch.Device("core 0", torch.device("cpu")), torch.matmul)[1] == digest


def test_memory_patterns_see_a_byte_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory that gives another byte back is told with its place; a sound one is silent."""
    assert memory.examine(2, 9) == []

    class Bad:
        def __init__(self, *_: object) -> None:
            self.held = bytearray(2 * memory.BLOCK)

        def __enter__(self) -> Bad:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __setitem__(self, at: slice, data: bytes) -> None:
            self.held[at] = data

        def __getitem__(self, at: slice) -> bytes:
            data = self.held[at]
            if at.start == memory.BLOCK:
                data[40] |= 0x08
            return bytes(data)

    monkeypatch.setattr("mmap.mmap", Bad)
    wrong = memory.examine(2, 9)
    assert wrong[0] == "memory pattern 0x55: block 1, byte 40 is 0x5d, not 0x55"


def test_a_share_is_kept() -> None:
    """A tenth of a core: nine times as long asleep as at work; a whole core never sleeps."""
    now, slept = [0.0], list[float]()
    rest = Pause(0.1, clock=lambda: now[0], sleep=slept.append)
    now[0] = 0.5
    rest()
    assert slept == [pytest.approx(4.5)]
    whole = Pause(2.0, clock=lambda: now[0], sleep=slept.append)
    whole()
    assert len(slept) == 1


def test_an_unknown_test_is_no_verdict() -> None:
    report = selftest.run("flux", seed=1, seconds=0)
    assert (report.passed, report.why) == (None, "no such test; there are gemm, memory, all")


def test_memory_that_failed_has_failed_without_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "examine", lambda *_, **__: ["memory: 1 word differs"])
    monkeypatch.setitem(sys.modules, "keepstep.probes.gemm_torch", None)
    report = selftest.run("all", seed=1, seconds=0)
    assert report.passed is False
    assert report.failed == ("memory: 1 word differs",)
    assert "torch is not there" in report.why
    monkeypatch.setattr(memory, "examine", lambda *_, **__: [])
    assert selftest.run("all", seed=1, seconds=0).passed is None
