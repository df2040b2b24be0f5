"""``keepstep ckpt``: plan, list, verify, restore and hand over checkpoints. Arguments only; the work is elsewhere."""

from __future__ import annotations

from typing import Annotated, Literal

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


Url = Annotated[str, Parameter(help="Path or URL given as --ckpt-dir: /data/run, s3://bucket/prefix")]
Job = Annotated[str, Parameter("--job", help="Instead: a job of this machine, or the beginning of its name")]
State = Annotated[str, Parameter("--state-dir", help="Home of run directories [env: KEEPSTEP_STATE_DIR]")]
StepNumber = Annotated[int | None, Parameter("--step", help="Of which step; the newest complete one if left out")]
To = Annotated[str, Parameter("--to", help="Where to")]
Format = Annotated[
    Literal["dcp", "safetensors"],
    Parameter(help="dcp: torch.distributed.checkpoint; safetensors: a folder of weights"),
]


@app.command
def ls(url: Url = "", *, job: Job = "", state_dir: State = "", output: Output = "table", json: Json = False) -> int:
    """The checkpoints in a place, the newest first: complete, verified or damaged, how old, how large."""
    from keepstep.cli.ckpt_look import show_list
    from keepstep.cli.ckpt_place import place

    return show_list(place(url, job, state_dir), "json" if json else output)


@app.command
def show(
    url: Url = "",
    *,
    job: Job = "",
    state_dir: State = "",
    step: StepNumber = None,
    tensors: Annotated[bool, Parameter(negative="", help="List every tensor with its place in the whole")] = False,
    output: Output = "table",
    json: Json = False,
) -> int:
    """What one checkpoint is made of: the parts of its ranks, or its tensors."""
    from keepstep.cli.ckpt_look import show_one
    from keepstep.cli.ckpt_place import place

    return show_one(place(url, job, state_dir), step, tensors, "json" if json else output)


@app.command
def verify(
    url: Url = "",
    *,
    job: Job = "",
    state_dir: State = "",
    step: StepNumber = None,
    every: Annotated[bool, Parameter("--all", negative="", help="All complete ones")] = False,
    write: Annotated[
        bool, Parameter(negative="", help="Keep the result beside the checkpoint: verified.json or damaged.json")
    ] = False,
    output: Output = "table",
    json: Json = False,
) -> int:
    """Read everything of a checkpoint, and what it rests on, and compare it with its checksums; 1 when it differs."""
    from keepstep.cli.ckpt_look import verify as verify_them
    from keepstep.cli.ckpt_place import place

    return verify_them(place(url, job, state_dir), step, every, write, "json" if json else output)


@app.command
def restore(
    url: Url = "",
    *,
    to: To,
    job: Job = "",
    state_dir: State = "",
    step: StepNumber = None,
    output: Output = "table",
    json: Json = False,
) -> int:
    """Write one checkpoint elsewhere in full, so that it rests on no other: safetensors shards, verified on the way."""
    from keepstep.cli.ckpt_hand import restore as restore_it
    from keepstep.cli.ckpt_place import place

    return restore_it(place(url, job, state_dir), step, to, "json" if json else output)


@app.command
def export(
    url: Url = "",
    *,
    to: To,
    format: Format,
    weights_only: Annotated[bool, Parameter(negative="", help="Leave the optimizer's state out")] = False,
    job: Job = "",
    state_dir: State = "",
    step: StepNumber = None,
    output: Output = "table",
    json: Json = False,
) -> int:
    """Leave keepstep: whole tensors for torch.distributed.checkpoint, or as safetensors files."""
    from keepstep.cli.ckpt_hand import export_to
    from keepstep.cli.ckpt_place import place

    return export_to(place(url, job, state_dir), step, to, format, weights_only, "json" if json else output)


@app.command(name="import")
def import_(
    source: Annotated[str, Parameter(help="Folder to take the checkpoint from")],
    *,
    to: Annotated[str, Parameter("--to", help="Path or URL that `keepstep run --ckpt-dir` will be given")],
    step: Annotated[int, Parameter("--step", help="How many steps it stands for")],
    format: Format,
    model: Annotated[str, Parameter(help="Name of the model in the folder, and in ks.register()")] = "model",
    optimizer: Annotated[str, Parameter(help="The same of the optimizer (dcp)")] = "optimizer",
    also: Annotated[
        tuple[str, ...], Parameter(negative="", help="Further entries to take along (dcp): scheduler")
    ] = (),
    job: Annotated[str, Parameter("--job", help="Job that the checkpoint is said to be of")] = "imported",
    output: Output = "table",
    json: Json = False,
) -> int:
    """Come to keepstep: a checkpoint to go on from. DCP folders hold pickle: take them from whom you trust."""
    from keepstep.cli.ckpt_hand import import_from

    form = "json" if json else output
    return import_from(source, to, step, format, job=job, model=model, optimizer=optimizer, also=also, output=form)


@app.command
def gc(
    url: Url = "",
    *,
    job: Job = "",
    state_dir: State = "",
    keep: Annotated[int | None, Parameter(help="Keep the newest N; the job's own policy if left out")] = None,
    keep_every: Annotated[int | None, Parameter(help="Keep steps that are a multiple of this")] = None,
    keep_for: Annotated[str, Parameter(help="Keep what is younger: 24h")] = "",
    sdc_window: Annotated[str, Parameter(help="Keep one that is older than this: 6h")] = "",
    dry_run: Annotated[bool, Parameter(negative="", help="Only tell what would go, and why")] = False,
    yes: Annotated[bool, Parameter(["--yes", "-y"], negative="", help="Do not ask")] = False,
    output: Output = "table",
    json: Json = False,
) -> int:
    """Remove checkpoints that retention does not keep, and leftovers of interrupted writers."""
    from keepstep.cli.ckpt_look import gc as collect_them
    from keepstep.cli.ckpt_place import kept, place

    policy = kept(keep, keep_every, keep_for, sdc_window)
    return collect_them(place(url, job, state_dir), policy, dry_run, yes, "json" if json else output)
