"""``keepstep ckpt``: plan, list, verify, restore and hand over checkpoints. Arguments only; the work is elsewhere."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

app = App(name="ckpt", help="Plan, list, verify, restore, export and import checkpoints.")

Output = Annotated[str, Parameter(["--output", "-o"], help="table, wide, json, jsonl or csv")]
Json = Annotated[bool, Parameter("--json", negative="", help="Same as -o json")]
Gbps = Annotated[float | None, Parameter(help="Gbit/s of one node; 0: there is no such tier")]


@app.command
def plan(
    *,
    nodes: Annotated[int, Parameter(help="Nodes of the job")],
    tp: Annotated[int, Parameter(help="Ranks of a tensor-parallel group")] = 1,
    pp: Annotated[int, Parameter(help="Pipeline stages")] = 1,
    dp: Annotated[int, Parameter(help="Data-parallel replicas or shards; the rest of the ranks if left out")] = 0,
    gpus_per_node: Annotated[int, Parameter(help="Ranks on each node")] = 8,
    racks: Annotated[int, Parameter(help="Number of racks, neighbours together; not known if left out")] = 0,
    rack_size: Annotated[int, Parameter(help="Instead: nodes in each rack")] = 0,
    params: Annotated[str, Parameter(help="Parameters of the whole model: 70e9 or 70B")] = "",
    bytes_per_rank: Annotated[str, Parameter(help="Instead: state of one rank, such as 12GB")] = "",
    optimizer: Annotated[str, Parameter(help="adam, adamw, sgd or momentum (any optimizer with one moment)")] = "adam",
    dtype: Annotated[
        str, Parameter(help="fp32; bf16: with fp32 master copy and moments; pure-bf16: nothing but bf16")
    ] = "bf16",
    replicated: Annotated[
        bool, Parameter(negative="", help="Each data-parallel replica holds the whole state (DDP), not a shard of it")
    ] = False,
    step_s: Annotated[float | None, Parameter(help="Seconds per step")] = None,
    device_gbps: Annotated[float | None, Parameter(help="Gbit/s from one device to the host")] = None,
    peer_gbps: Gbps = None,
    local_gbps: Gbps = None,
    remote_gbps: Gbps = None,
    overhead: Annotated[str, Parameter(help="Share of a step that a snapshot may take")] = "1%",
    every: Annotated[int, Parameter(help="Steps between durable generations; what the bandwidth allows if 0")] = 0,
    full_every: Annotated[int, Parameter(help="Of durable generations every which one is written in full")] = 1,
    mtbf: Annotated[str, Parameter(help="Time between two faults of the whole job, such as 3h")] = "",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Where copies would lie, the memory and bandwidth they need, and what each kind of loss would cost."""
    from keepstep.cli.ckpt_plan import Question, show_plan

    question = Question(
        nodes=nodes,
        tp=tp,
        pp=pp,
        dp=dp,
        gpus_per_node=gpus_per_node,
        racks=racks,
        rack_size=rack_size,
        params=params,
        bytes_per_rank=bytes_per_rank,
        optimizer=optimizer,
        dtype=dtype,
        replicated=replicated,
        step_s=step_s,
        device_gbps=device_gbps,
        peer_gbps=peer_gbps,
        local_gbps=local_gbps,
        remote_gbps=remote_gbps,
        overhead=overhead,
        every=every,
        full_every=full_every,
        mtbf=mtbf,
    )
    return show_plan(question, "json" if json else output)
