"""Feeds ``keepstep explain`` what no log should be, for as long as it is told, and stops at the first exception.

    python tests/fuzz/explain.py --minutes 10 [--seed 7]

Logs are made by cutting, repeating, mixing and damaging the rules' own samples, so that every rule's code is reached.
After each log the same bytes are fed again in other pieces; the answer must be the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from keepstep.agent.first_error import TOTAL_CHARS, first_error
from keepstep.cli.explain import answer
from keepstep.cli.explain_history import history
from keepstep.cli.explain_page import page
from keepstep.cli.explain_read import unpacked
from keepstep.core.diagnose.codes import meanings
from keepstep.core.diagnose.explain import explain
from keepstep.core.diagnose.named import case_of, code_of
from keepstep.core.diagnose.rules import RULES
from keepstep.core.diagnose.similar import Past, similar
from keepstep.core.diagnose.xid_table import XIDS

KINDS = ("", "xid ", "exit:", "signal:", "nccl:", "cuda:", "sxid ", "GPU")
SLOW_S = 10.0
"""A log of this size must not take longer, not even on a busy machine."""
LONGEST = 200_000
SAMPLES = [sample.encode() for rule in RULES for sample in rule.samples]
SAMPLES += [b"NVRM: Xid (PCI:0000:04:00): %d, pid=1, name=x, text" % code for code in XIDS]
PREFIXES = [
    b"",
    b"[rank3]: ",
    b"3: ",
    b"node-017 kernel: ",
    b"2026-03-02T04:11:09.123Z ",
    b"[default0]:",
    b"node-1:r4 ",
    b"\x1b[31m",
    b"[pod/a-3/b] ",
]
ENDS = [b"\n", b"\r\n", b"\r", b"", b"\0", b"\n\n"]


def log(luck: random.Random) -> bytes:
    lines = []
    for _ in range(luck.randint(0, 60)):
        line = luck.choice(PREFIXES) + luck.choice(SAMPLES)
        match luck.randrange(8):
            case 0:
                line = line[: luck.randrange(len(line) + 1)]
            case 1:
                at = luck.randrange(len(line) + 1)
                line = line[:at] + luck.randbytes(luck.randint(1, 20)) + line[at:]
            case 2:
                line = line * luck.randint(1, 40)
            case 3:
                line = bytes(luck.choice(b"0123456789") if byte in b"0123456789" else byte for byte in line)
            case 4:
                line = luck.choice([line.decode("utf-8", "replace").encode("utf-16"), line.upper(), line[::-1]])
            case _:
                pass
        lines.append(line + luck.choice(ENDS))
    return b"".join(lines)[:LONGEST]


def check(data: bytes, luck: random.Random) -> None:
    began = time.perf_counter()
    said = explain([data])
    took = time.perf_counter() - began
    assert took < SLOW_S, f"took {took:.1f} s"
    assert page(said)
    assert 0 <= said.confidence <= 1
    assert json.loads(json.dumps(answer(said)))["code"] == code_of(said)
    assert len(similar(case_of(said), [Past(id="x", case=case_of(said))])) <= 1
    for code in (
        code_of(said),
        data[:12].decode("utf-8", "replace"),
        f"{luck.choice(KINDS)}{luck.randint(-300, 3000)}",
    ):
        for one in meanings(code):
            assert one.what
            assert 0 <= one.likelihood <= 1
    size = luck.randint(1, 5_000)
    assert explain(data[at : at + size] for at in range(0, len(data), size)) == said, "the cuts decide"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rank_0.err"
        file.write_bytes(data)
        assert sum(map(len, first_error(str(file), ""))) <= TOTAL_CHARS
        (Path(folder) / "old.jsonl").write_bytes(data + json.dumps(answer(said)).encode() + b"\n" + data)
        history([folder])
    packed = bytearray(gzip.compress(data))
    packed[luck.randrange(len(packed))] ^= 1 << luck.randrange(8)
    explain(unpacked([bytes(packed)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    luck = random.Random(seed)
    print(f"seed {seed}", file=sys.stderr)
    end = time.monotonic() + given.minutes * 60
    count = 0
    while time.monotonic() < end:
        data = log(luck)
        try:
            check(data, luck)
        except Exception:
            path = Path(f"fuzz-{seed}-{count}.log")
            path.write_bytes(data)
            print(f"log {count} of seed {seed} is kept in {path}", file=sys.stderr)
            raise
        count += 1
    print(f"{count} logs, no exception")
    return 0


if __name__ == "__main__":
    sys.exit(main())
