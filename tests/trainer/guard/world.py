"""A small world of real processes over gloo, under no agent."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

from tests.trainer.sdk.zygote import Zygote

SCRIPT = Path(__file__).with_name("guard_script.py")


class Outcome(NamedTuple):
    """What became of each rank."""

    codes: list[int]
    ranks: list[dict[str, Any]]
    said: str
    """The standard error of rank 0, which speaks for all."""

    @property
    def losses(self) -> list[dict[str, str]]:
        return [rank["losses"] for rank in self.ranks]


def run(zygote: Zygote, root: Path, *, world: int = 4, guard: dict[str, Any], fault: str = "", **more: str) -> Outcome:
    """Train to the end, with one fault in it."""
    root.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(world):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
        environment |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "ROOT": str(root),
            "GUARD": json.dumps(guard), **({"FAULT": fault} if fault else {}), **more,
        }  # fmt: skip
        children.append(zygote.spawn(str(SCRIPT), environment, str(root / f"{rank}.out"), str(root / f"{rank}.err")))
    codes = [child.wait(60) for child in children]
    ranks = [json.loads((root / f"rank{rank}.json").read_text()) for rank in range(world)]
    return Outcome(codes, ranks, (root / "0.err").read_text())
