"""Scenarios that run as one member of a group, each in a process of its own; and the process that serves stores.

A scenario gets a connection to the test and what it needs to join. What it sends back is plain data.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from keepstep.trainer import circuit_torch
from keepstep.trainer.exceptions import CommunicationAborted, GroupsAborted, GroupsUnsupported, RebuildTimeout
from keepstep.trainer.flight import Flight
from keepstep.trainer.frameworks_torch import (
    adopt_ddp_layout,
    arrange_ddp_buckets,
    ddp_layout,
    reset_after_abort,
)
from keepstep.trainer.groups_torch import GROUPS
from keepstep.trainer.swap_torch import SwapGroup

LIMIT_S = 20.0


def body(scenario: str, conn: Connection, options: dict[str, Any]) -> None:
    """Entry of every process."""
    torch.set_num_threads(1)
    try:
        SCENARIOS[scenario](conn, **options)
    except BaseException:
        conn.send(("error", traceback.format_exc()))
        raise


def serve_stores(conn: Connection) -> None:
    kept = []
    while conn.recv() is not None:
        kept.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        conn.send(kept[-1].port)


def client(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))


def join(rank: int, world: int, port: int, *, stand_in: bool = False) -> None:
    store = None if stand_in else client(port)
    GROUPS.start(rank=rank, world_size=world, store=store, key="e1", stand_in=stand_in, timeout=timedelta(seconds=120))


def rejoin(
    rank: int, world: int, port: int, key: str = "e2", limit_s: float = LIMIT_S, aborts: int | None = None
) -> dict[str, float]:
    return GROUPS.rebuild(
        store_host="127.0.0.1",
        store_port=port,
        key=key,
        rank=rank,
        world_size=world,
        limit_s=limit_s,
        aborts=aborts,
    )


def abort_when_told(conn: Connection) -> threading.Thread:
    def listen() -> None:
        conn.recv()
        GROUPS.abort("the test says so")

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    return thread


# -------------------------------------------------------------------- collectives


def every_operation(rank: int, world: int) -> dict[str, Any]:
    """Results of each collective, as lists; the inputs depend on the rank alone."""
    mine = torch.arange(4.0) + 10 * rank
    found: dict[str, Any] = {}

    def keep(name: str, *tensors: Tensor) -> None:
        found[name] = [t.tolist() for t in tensors]

    t = mine.clone()
    dist.all_reduce(t)
    keep("all_reduce", t)
    t = mine.clone()
    dist.all_reduce(t, op=dist.ReduceOp.MAX, async_op=True).wait()  # type: ignore[union-attr]
    keep("all_reduce_async", t)
    t = mine.clone()
    future = dist.all_reduce(t, async_op=True).get_future()  # type: ignore[union-attr]
    future.wait()
    keep("all_reduce_future", t, *future.value())
    t = mine.clone()
    dist.reduce(t, dst=1)
    if rank == 1:
        keep("reduce", t)
    t = mine.clone()
    dist.broadcast(t, src=1)
    keep("broadcast", t)
    many = [torch.zeros(4) for _ in range(world)]
    dist.all_gather(many, mine)
    keep("all_gather", *many)
    t = torch.zeros(4 * world)
    dist.all_gather_into_tensor(t, mine)
    keep("all_gather_into_tensor", t)
    t = torch.zeros(2)
    dist.reduce_scatter_tensor(t, torch.arange(2.0 * world) + rank)
    keep("reduce_scatter_tensor", t)
    t = torch.zeros(2)
    dist.reduce_scatter(t, [torch.ones(2) * (i + rank) for i in range(world)])
    keep("reduce_scatter", t)
    t = torch.zeros(world)
    dist.all_to_all_single(t, torch.arange(float(world)) + 10 * rank)
    keep("all_to_all_single", t)
    many = [torch.zeros(4) for _ in range(world)]
    dist.gather(mine, many if rank == 0 else None, dst=0)
    keep("gather", *many)
    t = torch.zeros(4)
    dist.scatter(t, [torch.ones(4) * i for i in range(world)] if rank == 0 else None, src=0)
    keep("scatter", t)
    t = torch.zeros(4)
    sent = dist.isend(mine, (rank + 1) % world)
    dist.recv(t, (rank - 1) % world)
    assert sent is not None
    sent.wait()
    keep("send_recv", t)
    if rank == 0:
        t = torch.zeros(4)
        found["recv_any_source"] = [dist.recv(t), t.tolist()]
    elif rank == 1:
        dist.send(mine, 0)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    found["all_gather_object"] = objects
    one: list[Any] = [f"from {rank}"]
    dist.broadcast_object_list(one, src=1)
    found["broadcast_object_list"] = one
    group = dist.group.WORLD
    assert group is not None
    keep("funcol_all_reduce", funcol.all_reduce(mine, "sum", group) + 0)
    keep("funcol_all_gather", funcol.all_gather_tensor(mine, 0, group) + 0)
    keep("funcol_reduce_scatter", funcol.reduce_scatter_tensor(torch.ones(2 * world) * rank, "sum", 0, group) + 0)
    keep("funcol_all_to_all", funcol.all_to_all_single(torch.arange(float(world)), None, None, group) + 0)
    dist.barrier()
    return found


def operations(conn: Connection, rank: int, world: int, port: int, ours: bool) -> None:
    """Each collective over our groups, or over torch's own."""
    if ours:
        join(rank, world, port)
    else:
        dist.init_process_group("gloo", store=client(port), rank=rank, world_size=world)
    conn.send(every_operation(rank, world))
    dist.destroy_process_group()
    conn.send((GROUPS.started, GROUPS.finished) if ours else None)


# -------------------------------------------------------------------- abort


def _sync() -> None:
    dist.all_reduce(torch.ones(1000))


def _future() -> None:
    dist.all_reduce(torch.ones(1000), async_op=True).get_future().wait()  # type: ignore[union-attr]


def _recv() -> None:
    dist.recv(torch.ones(1000), 1)


def _funcol() -> None:
    group = dist.group.WORLD
    assert group is not None
    _ = funcol.all_reduce(torch.ones(10), "sum", group) + 0


def _reducer() -> None:
    _DDP[0](torch.ones(2, 8)).sum().backward()


def _new_group() -> None:
    dist.new_group([0, 1])


def _object() -> None:
    dist.all_gather_object([None, None], "x")


def _two() -> list[Tensor]:
    return [torch.ones(2), torch.ones(2)]


def _funcol_reduce_scatter() -> None:
    group = dist.group.WORLD
    assert group is not None
    _ = funcol.reduce_scatter_tensor(torch.ones(4), "sum", 0, group) + 0


def _send_and_wait() -> None:
    work = dist.irecv(torch.ones(8), 1)
    assert work is not None
    work.wait()


_DDP: list[DDP] = []
WAITS: dict[str, Callable[[], None]] = {
    "all_gather": lambda: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2)),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2)),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4)),
    "barrier": lambda: dist.barrier(),
    "broadcast": lambda: dist.broadcast(torch.ones(2), 1),
    "gather": lambda: dist.gather(torch.ones(2), _two() if dist.get_rank() == 0 else None),
    "reduce": lambda: dist.reduce(torch.ones(2), 0),
    "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(2), torch.ones(2)]),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4)),
    "funcol_reduce_scatter": _funcol_reduce_scatter,
    "scatter": lambda: dist.scatter(torch.ones(2), _two() if dist.get_rank() == 1 else None, src=1),
    "irecv": _send_and_wait,
    "sync": _sync,
    "future": _future,
    "recv": _recv,
    "funcol": _funcol,
    "reducer": _reducer,
    "new_group": _new_group,
    "object": _object,
}


def waiter(conn: Connection, rank: int, world: int, port: int, how: str) -> None:
    """Wait in a collective that the other member never enters; say when and how that ended.

    The connections are not shut down, so that gloo itself never returns: the abort has to be certain without its help.
    """
    circuit_torch.shut_down = lambda _: 0
    join(rank, world, port)
    if how == "reducer":
        _DDP.append(DDP(nn.Linear(8, 8)))
    if how in ("recv", "irecv") and rank == 1:
        dist.send(torch.ones(1000 if how == "recv" else 8), 0)
    else:
        WAITS[how]()  # once with everybody there, so that nothing is left to be imported or built
    dist.barrier()
    if rank != 0:
        conn.send("absent")
        signal.pause()
    listener = abort_when_told(conn)
    conn.send("waiting")
    try:
        WAITS[how]()
    except (RuntimeError, CommunicationAborted) as error:
        freed = time.monotonic()
        listener.join()
        conn.send((freed, type(error).__name__, str(error), GROUPS.aborted, GROUPS.broken))
        try:
            dist.all_reduce(torch.ones(1))
        except CommunicationAborted as later:
            conn.send(str(later))
        GROUPS.abort("again")
        conn.send(GROUPS.aborts)
    sys.exit(0)  # no hang on the way out, destructors included


def ended(conn: Connection, rank: int, world: int, port: int) -> None:
    """Launch collectives that the others never enter, abort, and say whether gloo's own works came to an end."""
    join(rank, world, port)
    dist.barrier()
    if rank != 0:
        conn.send("absent")
        signal.pause()
    group = dist.group.WORLD
    assert isinstance(group, SwapGroup)
    circuit = group.circuit
    assert circuit is not None
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(2)]
    conn.send((len(circuit._connections), [w.inner.is_completed() for w in works]))  # type: ignore[union-attr]
    conn.recv()
    GROUPS.abort("test")
    conn.send((circuit.settle(10.0), [w.inner.is_completed() for w in works]))  # type: ignore[union-attr]
    sys.exit(0)


# -------------------------------------------------------------------- rebuild


def survivor(conn: Connection, rank: int, world: int, port: int) -> None:
    """Train over several groups; told of a new store, rebuild and use the same objects."""
    join(rank, world, port)
    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    along = mesh.get_group()
    before = [id(dist.group.WORLD), id(pair), id(along)]
    conn.send("up")
    try:
        while True:
            dist.all_reduce(torch.ones(10000))
    except RuntimeError:
        pass
    port = conn.recv()
    GROUPS.abort("told")
    phases = rejoin(rank, world, port)
    assert before == [id(dist.group.WORLD), id(pair), id(along)]
    _use_again(conn, rank, world, pair, along)
    conn.send(sorted(phases))
    dist.destroy_process_group()


def newcomer(conn: Connection, rank: int, world: int, port: int) -> None:
    """The same set-up as the survivors', on stand-ins."""
    join(rank, world, port, stand_in=True)
    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    along = mesh.get_group()
    conn.send("up")
    port = conn.recv()
    phases = rejoin(rank, world, port)
    _use_again(conn, rank, world, pair, along)
    conn.send(sorted(phases))
    dist.destroy_process_group()


def _use_again(conn: Connection, rank: int, world: int, pair: Any, along: Any) -> None:
    assert not GROUPS.aborted
    assert GROUPS.broken is None
    found = []
    for group in (None, along, *([pair] if rank < 2 else [])):
        t = torch.ones(1) * rank
        dist.all_reduce(t, group=group)
        found.append(float(t))
    later = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        t = torch.ones(1) * rank
        dist.all_reduce(t, group=later)
        found.append(float(t))
    dist.barrier()
    conn.send(found)


def alone(conn: Connection, rank: int, world: int, port: int, limit_s: float) -> None:
    """Rebuild where nobody else comes: ended by an abort if the test says so, else by the limit."""
    join(rank, world, port, stand_in=True)
    aborts = GROUPS.aborts
    abort_when_told(conn)
    conn.send("rebuilding")
    began = time.monotonic()
    try:
        rejoin(rank, world, port, "e2", limit_s, aborts)
    except (GroupsAborted, RebuildTimeout) as error:
        conn.send((time.monotonic() - began, type(error).__name__, str(error)))
    conn.send(GROUPS.leftovers())
    sys.exit(0)


def interrupted(conn: Connection, rank: int, world: int, port: int) -> None:
    """A rebuild that a second fault ends, and the next one, which succeeds."""
    join(rank, world, port, stand_in=True)
    aborts = GROUPS.aborts
    abort_when_told(conn)
    conn.send("rebuilding")
    try:
        rejoin(rank, world, port, "e2", aborts=aborts)
    except GroupsAborted:
        conn.send("interrupted")
    try:
        rejoin(rank, world, port, "e3", aborts=aborts)
    except GroupsAborted:
        conn.send("stale")
    conn.recv()
    rejoin(rank, world, port, "e4")
    dist.barrier()
    conn.send("rebuilt")
    dist.destroy_process_group()


def odd_group(conn: Connection, rank: int, world: int, port: int) -> None:
    """Rank 0 has made a group that the other does not have."""
    join(rank, world, port, stand_in=True)
    if rank == 0:
        dist.new_group([0, 1])
    try:
        rejoin(rank, world, port, limit_s=2.0)
    except RebuildTimeout as error:
        conn.send(str(error))
    else:
        conn.send("rebuilt")
        conn.recv()


def refused(conn: Connection, port: int) -> None:
    """What cannot be rebuilt says why."""
    join(0, 2, port, stand_in=True)
    said = []
    try:
        join(0, 2, port, stand_in=True)
    except GroupsUnsupported as error:
        said.append(str(error))
    try:
        rejoin(1, 2, port)
    except GroupsUnsupported as error:
        said.append(str(error))
    dist.new_group([0], backend="gloo")
    try:
        rejoin(0, 2, port)
    except GroupsUnsupported as error:
        said.append(str(error))
    conn.send(said)


# -------------------------------------------------------------------- stand-in and frameworks


def set_up_alone(conn: Connection, rank: int, world: int, port: int) -> None:
    """What scripts do before the loop works with nobody else there."""
    join(rank, world, port, stand_in=True)
    ddp = DDP(nn.Linear(8, 8))
    ddp(torch.ones(2, 8)).sum().backward()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    sharded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, rank)
    conn.send(objects)
    dist.barrier()
    try:
        dist.broadcast_object_list([None], src=(rank + 1) % world)
    except GroupsUnsupported as error:
        conn.send(str(error))
    conn.send([str(p.device) for p in sharded.parameters()])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])
        self.fuse = -1

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) + x
            if i == self.fuse and x.requires_grad:
                x.register_hook(_break)
        return x


class Fuse(RuntimeError):
    """Stands for an abort that strikes in the backward pass."""


def _break(_grad: Tensor) -> None:
    raise Fuse


def _steps(model: nn.Module, net: Net, break_at: int | None) -> list[str]:
    """Losses of five steps; one of them may be broken off in its backward pass, reset and repeated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(5):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        if step == break_at:
            net.fuse = 2
            try:
                model(x).square().mean().backward()
            except Fuse:
                reset_after_abort([model], [optimizer])
            net.fuse = -1
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def broken_step(conn: Connection, port: int, kind: str, break_at: int | None) -> None:
    """A step that ends in the middle of the backward pass leaves nothing behind."""
    join(0, 2, port, stand_in=True)
    torch.manual_seed(0)
    net = Net()
    model: nn.Module = net
    if kind == "fsdp2":
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
    else:
        model = DDP(net, bucket_cap_mb=0.01, gradient_as_bucket_view=kind == "ddp-view")
    conn.send(_steps(model, net, break_at))


def layouts(conn: Connection, port: int) -> None:
    """A fresh DDP takes over the bucket order of one that has trained, and of an odd one; a foreign one is refused."""
    join(0, 2, port, stand_in=True)

    def fresh(**options: Any) -> DDP:
        torch.manual_seed(0)
        return DDP(Net(), bucket_cap_mb=0.01, **options)

    old = fresh()
    for _ in range(3):
        old(torch.ones(2, 32)).sum().backward()
    wanted = ddp_layout(old)
    new = fresh()
    conn.send((len(ddp_layout(new)), len(wanted)))
    conn.send((adopt_ddp_layout(new, wanted), ddp_layout(new) == wanted, adopt_ddp_layout(new, wanted)))
    old.zero_grad()
    for _ in range(3):
        for ddp in (old, new):
            ddp(torch.ones(2, 32)).sum().backward()
    same = all(torch.equal(p.grad, q.grad) for p, q in zip(old.parameters(), new.parameters(), strict=True))  # type: ignore[arg-type]
    conn.send((same, ddp_layout(old) == ddp_layout(new) == wanted))
    early = fresh()
    first = ddp_layout(early)
    early(torch.ones(2, 32)).sum().backward()
    conn.send((arrange_ddp_buckets(early), ddp_layout(early) == wanted, arrange_ddp_buckets(early)))
    conn.send((adopt_ddp_layout(early, first), ddp_layout(early) == first))
    odd = fresh()
    adopt_ddp_layout(odd, wanted[::-1])
    conn.send(ddp_layout(odd) == wanted[::-1])
    said = []
    for ddp, layout in ((fresh(), (("no.such",),)), (fresh(static_graph=True), wanted)):
        try:
            adopt_ddp_layout(ddp, layout)
        except RuntimeError as error:
            said.append(str(error))
    conn.send(said)


# -------------------------------------------------------------------- counting


def counting(conn: Connection, rank: int, world: int, port: int) -> None:
    """Counters, the mark of a step and the hook before the first reduction."""
    join(rank, world, port)
    pair = dist.new_group(list(range(world)))
    alone_group = [dist.new_group([r]) for r in range(world)][rank]
    told: list[Any] = []
    beats: list[tuple[int, int]] = []
    GROUPS.on_progress = lambda started, finished: beats.append((started, finished))

    def before() -> None:
        told.append("hook")
        dist.all_reduce(torch.ones(1))  # does not call the hook again

    GROUPS.before_reduce = before
    first = GROUPS.started
    GROUPS.mark()
    dist.all_reduce(torch.ones(1), group=alone_group)
    told.append(GROUPS.world_ops_since_mark())
    dist.broadcast(torch.ones(1), 0)
    dist.all_reduce(torch.ones(1), group=pair)
    told.append(GROUPS.world_ops_since_mark())
    GROUPS.mark()
    told.append(GROUPS.world_ops_since_mark())
    dist.barrier()
    told.append("no hook before a barrier")
    dist.reduce_scatter_tensor(torch.ones(1), torch.ones(world))
    told.append(GROUPS.started - first)
    conn.send((told, GROUPS.finished == GROUPS.started, beats[-1] == (GROUPS.started, GROUPS.finished)))
    dist.destroy_process_group()


def tells_positions(conn: Connection, rank: int, world: int, port: int, node: str) -> None:
    """Three ranks: 0 waits for a message of 1's, 1 in the world's second reduction, and 2 does not come to it."""
    GROUPS.tell_positions(Flight(Path(node) / "flight" / f"s{rank}"))
    join(rank, world, port)
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2, 3))
    if rank < 2:
        dist.all_reduce(torch.ones(5, dtype=torch.float64), group=pair)
    stopped = abort_when_told(conn)
    conn.send("ready")
    try:
        if rank == 0:
            dist.recv(torch.ones(7), 1)
        if rank == 1:
            dist.all_reduce(torch.ones(4096))
    except CommunicationAborted:
        pass
    stopped.join(LIMIT_S)
    conn.send("free")
    rejoin(rank, world, conn.recv())
    dist.barrier()
    conn.send("again")
    conn.recv()


# -------------------------------------------------------------------- CUDA through a double


def nccl_double(conn: Connection, port: int) -> None:
    """The CUDA way with a double for ProcessGroupNCCL: made per group and epoch, aborted, swapped in place."""
    from torch._C._distributed_c10d import FakeProcessGroup

    from keepstep.trainer.groups_torch import Groups
    from keepstep.trainer.seats_torch import Nccl

    made: list[tuple[str, int, list[int]]] = []
    aborted: list[Any] = []
    done = threading.Semaphore(0)

    class Double(Nccl):
        """Notes what it is asked for; the backends are torch's fakes, whose collectives do nothing."""

        def make(self, store: Any, rank: int, ranks: Any, *, name: str, timeout: timedelta) -> Any:
            made.append((name, rank, list(ranks)))
            return FakeProcessGroup._create_internal(rank, len(ranks))

        def abort(self, backend: Any) -> None:
            aborted.append(backend)
            done.release()

    groups = Groups(nccl=Double())
    groups.start(rank=0, world_size=1, store=client(port), key="e1", stand_in=False, device="cuda")
    sub = dist.new_group([0])
    cuda = torch.device("cuda")
    world = dist.group.WORLD
    assert world is not None
    first = world._get_backend(cuda)
    t = torch.ones(3)
    dist.all_reduce(t)  # CPU tensors go over gloo
    groups.abort("test")
    assert done.acquire(timeout=5)
    assert done.acquire(timeout=5)
    phases = groups.rebuild(store_host="127.0.0.1", store_port=port, key="e2", rank=0, world_size=1, limit_s=10)
    second = world._get_backend(cuda)
    dist.all_reduce(t)
    dist.all_reduce(t, group=sub)
    conn.send(
        {
            "type": type(world).__name__,
            "made": made,
            "aborted": len(aborted),
            "the first was aborted": any(backend is first for backend in aborted),
            "swapped": first is not second,
            "result": t.tolist(),
            "phases": sorted(phases),
            "world_ops": groups.world_ops_since_mark(),
        }
    )
    os._exit(0)


SCENARIOS: dict[str, Callable[..., None]] = {
    name: value
    for name, value in globals().items()
    if callable(value) and getattr(value, "__module__", "") == __name__ and not name.startswith("_")
}
