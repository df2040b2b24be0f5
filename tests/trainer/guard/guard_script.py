"""One rank of a small world that trains under guard, and has one fault put into it. Told by the environment.

``FAULT``: ``<what>:<rank>:<step>:<times>``. ``weight`` flips a bit of a parameter after the update, ``moment`` one of
Adam's. ``gradient`` makes one value of the last layer's output gradient huge, before any reduction, as a flipped bit of
its exponent does. ``nan`` makes the rank's batch NaN, ``spike`` makes it large: a processor that fails, whatever it is
given. ``sample`` makes one of the samples NaN that the rank uses in that step, whoever reads it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import keepstep
from keepstep.trainer.data import StepData

ROOT, KIND, TOTAL = Path(os.environ["ROOT"]), os.environ.get("KIND", "ddp"), int(os.environ.get("TOTAL", "24"))
WHAT, RANK, STEP, TIMES = (*os.environ.get("FAULT", "none:0:0:0").split(":"), "")[:4]
LEFT = [int(TIMES or 0)]


def build(ks: keepstep.Keepstep) -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 8))
    if KIND == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sizes = (2, ks.world_size // 2) if KIND == "hsdp" else (ks.world_size,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    return fully_shard(model, mesh=mesh)


def strikes(ks: keepstep.Keepstep, what: str, step: int) -> bool:
    if what != WHAT or ks.rank != int(RANK) or step != int(STEP) or LEFT[0] == 0:
        return False
    LEFT[0] -= 1
    return True


def flip(tensor: Tensor, element: int, bit: int) -> None:
    here = tensor.detach()
    here = getattr(here, "_local_tensor", here)
    here.view(torch.int32).view(-1)[element] ^= 1 << bit


def main() -> None:
    torch.set_num_threads(1)
    ks = keepstep.init(guard=keepstep.Guard(**json.loads(os.environ.get("GUARD", "{}"))), timeout=60)
    model = build(ks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(640, 16, generator=torch.Generator().manual_seed(1))
    if WHAT == "sample":
        place = StepData(inputs, 4, seed=3, rank=int(RANK), world_size=ks.world_size)
        inputs[place.indices(int(STEP) * place.stride)[1]] = float("nan")
    data = StepData(inputs, 4, seed=3, rank=ks.rank, world_size=ks.world_size, collate=torch.stack)
    ks.register(model=model, optimizer=optimizer, data=data)
    torch.manual_seed(100 + ks.rank)
    losses: dict[int, str] = {}
    order: list[int] = []
    last = list(model.parameters())[2]
    try:
        for step in ks.steps(TOTAL):
            with step:
                order.append(step.index)
                pause(ks, step.index)
                x = next(data)
                if strikes(ks, "nan", step.index):
                    x = x * float("nan")
                if strikes(ks, "spike", step.index):
                    x = x * 1000.0
                out = model(x)
                if strikes(ks, "gradient", step.index):
                    out.register_hook(bent)
                loss = (out - x[:, :8]).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if strikes(ks, "weight", step.index):
                    flip(last, 5, 20)
                if strikes(ks, "moment", step.index):
                    flip(optimizer.state[last]["exp_avg"], 3, 11)
                losses[step.index] = float(loss.detach()).hex()
                step.commit(loss=loss)
    finally:
        found = {"losses": losses, "order": order, "weights": [float(p.detach().sum()) for p in model.parameters()]}
        (ROOT / f"rank{ks.rank}.json").write_text(json.dumps(found))


def pause(ks: keepstep.Keepstep, step: int) -> None:
    """Wait in the step ``PAUSE_AT`` until the test has done what it wants to do."""
    if str(step) == os.environ.get("PAUSE_AT") and not (ROOT / "go").exists():
        (ROOT / f"paused{ks.rank}").touch()
        while not (ROOT / "go").exists():
            time.sleep(0.02)


def bent(gradient: Tensor) -> Tensor:
    whole = gradient.clone()
    flip(whole, 5, int(os.environ.get("BIT", "30")))
    return whole


if __name__ == "__main__":
    main()
    sys.stdout.flush()
