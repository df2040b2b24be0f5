"""One rank of a small world: trains and saves, or restores and shows what it got. Told by the environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from keepstep.checkpoint import archive, pair
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.slot import Slot, Version
from keepstep.checkpoint.source import Source
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.model import env
from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Member, Place, Roster
from keepstep.trainer.data import StepData
from keepstep.trainer.recovery_torch import Restorer
from keepstep.trainer.snapshots_torch import Snapshots
from keepstep.trainer.state_torch import State

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD"])
KIND, ROOT = os.environ["KIND"], Path(os.environ["ROOT"])


class PerRank:
    """State that only its own rank understands."""

    def __init__(self) -> None:
        self.value = RANK

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def build(seed: int) -> tuple[State, nn.Module, torch.optim.Optimizer, StepData[Any]]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    if KIND == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif KIND == "tp":
        mesh = init_device_mesh("cpu", (WORLD,))
        for linear in (model[0], model[3]):  # type: ignore[index]
            for name, dim in (("weight", 1), ("bias", 0)):
                whole = getattr(linear, name).detach()
                setattr(linear, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)])))
    elif KIND != "plain":
        shape = (2, WORLD // 2) if KIND == "hsdp" else (WORLD,)
        names = ("replicate", "shard") if KIND == "hsdp" else ("shard",)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in (model[0], model[3]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    heads = [p for n, p in model.named_parameters() if "bias" in n]
    bodies = [p for n, p in model.named_parameters() if "bias" not in n]
    optimizer = torch.optim.AdamW([{"params": bodies}, {"params": heads, "lr": 1e-3}], lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    samples = torch.randn(120, 5, generator=torch.Generator().manual_seed(1))
    data = StepData(samples, 12 // WORLD, seed=3, rank=RANK, world_size=WORLD, collate=torch.stack)
    state = State()
    more = {"odd": PerRank()} if os.environ.get("ODD") else {}
    state.register({"model": model, "optimizer": optimizer, "schedule": schedule, "data": data, **more}, None)
    state.bind()
    return state, model, optimizer, data


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: StepData[Any], state: State) -> None:
    """Made-up gradients that are the same in every layout: they depend on the whole tensor's values alone."""
    for parameter in model.parameters():
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            made = torch.sin(whole.to_local() * 3 + 0.1)
            parameter.grad = DTensor.from_local(
                made, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
            )
        else:
            parameter.grad = torch.sin(whole * 3 + 0.1)
    next(data)
    optimizer.step()
    for name, buffer in model.named_buffers():
        if "mean" in name:
            buffer.add_(RANK + 1)
    torch.rand(RANK + 1)
    schedule: Any = state.others["schedule"]
    schedule.step()


def whole(value: torch.Tensor) -> list[Any]:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return [list(full.shape), full.detach().reshape(-1).view(torch.uint8).tolist()]


def show(state: State, model: nn.Module, optimizer: torch.optim.Optimizer, data: StepData[Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    names = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        names[id(parameter)] = name
        shown[f"p/{name}"] = whole(parameter)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                shown[f"o/{names[id(parameter)]}/{key}"] = whole(value)
    return {
        "tensors": shown,
        "buffers": {name.removeprefix("module."): whole(b) for name, b in model.named_buffers()},
        "lr": [group["lr"] for group in optimizer.param_groups],
        "position": data.position,
        "random": torch.get_rng_state().tolist(),
        "schedule": state.others["schedule"].state_dict()["last_epoch"],
    }


def roster() -> Roster:
    members = tuple(Member(rank=Rank(i), node=NodeId("n"), slot=SlotId(str(i)), local_rank=i) for i in range(WORLD))
    place = Place(node=NodeId("n"), host="127.0.0.1", keeper_port=0, peer_port=0)
    return Roster(
        job=JobId("j"),
        epoch=Epoch(9),
        origin="controller",
        mode="fresh",
        world_size=WORLD,
        members=members,
        places=(place,),
        store_host="",
        store_port=0,
    )


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=RANK, world_size=WORLD)
    node_dir = Path(os.environ["NODE_DIR"])
    (node_dir / env.SNAP_DIR).mkdir(parents=True, exist_ok=True)
    local = os.environ.get("LOCAL", "").replace("RANK", str(RANK))
    policy = CheckpointPolicy(dir=os.environ.get("SHARED", ""), local_dir=local)
    config = CheckpointConfig(job=JobId("j"), policy=policy)
    state, model, optimizer, data = build(7 if os.environ["DO"] == "save" else 99)
    snapshots = Snapshots(node_dir / env.SNAP_DIR, RANK, node_dir / env.KEEPER_SOCKET, config)
    out: dict[str, Any] = {}
    if os.environ["DO"] == "save":
        places = [(local, "local"), (policy.dir, "remote")]
        tiers = [open_tier(where, label, create=True) for where, label in places if where]
        for step in range(1, int(os.environ.get("STEPS", "3")) + 1):
            train(model, optimizer, data, state)
            version = Version(step, 1)
            snapshots.save(state, version, key="k", full=True, ring=False, world_size=WORLD)
            (path,) = (p for v, p in pair.look(node_dir / env.SNAP_DIR, RANK) if v == version)
            slot = Slot(path)
            slot.seal()  # as the keeper does, then as the archiver does
            for tier in tiers:
                archive.write_part(tier, Source.of_slot(slot), job="j", rank=RANK, world_size=WORLD)
            slot.close()
            dist.barrier()
            if RANK == 0 and policy.dir:
                archive.complete(open_tier(policy.dir), version, WORLD)
            dist.barrier()
            out[str(step)] = show(state, model, optimizer, data)
    else:
        restorer = Restorer(state, snapshots, "", node_dir / env.SNAP_DIR, lambda: False)
        try:
            found = restorer.meet(roster(), RANK, None, newcomer=False, all_new=True)
            out = {"step": found.version.step if found.version else None, "source": found.source}
            out |= show(state, model, optimizer, data)
            train(model, optimizer, data, state)
        except Exception as error:
            out = {"error": f"{type(error).__name__}: {error}"}
    (ROOT / f"{os.environ['NAME']}.{RANK}").write_text(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
