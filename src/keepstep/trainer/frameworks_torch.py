"""Brings DDP and FSDP2 back to a clean idle state after an abort, and lines up DDP's buckets.

Both keep state across a step (buckets in flight, parameters half gathered) that an exception in mid-step leaves
behind. DDP also arranges its buckets anew after its first step, in the order in which gradients became ready: a
survivor has done that, a newcomer has not, and two ranks with different buckets would add up different things. And
since the arrangement decides the order of summation, it belongs to the state of a step like any tensor: save
``ddp_layout`` with it (after ``arrange_ddp_buckets``) and ``adopt_ddp_layout`` when it is restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from keepstep.trainer.circuit_torch import Circuit
from keepstep.trainer.exceptions import FrameworkUnsupported
from keepstep.trainer.meter import Meter
from keepstep.trainer.standin_torch import DoneWork, StandIn
from keepstep.trainer.swap_torch import SwapGroup

DdpLayout = tuple[tuple[str, ...], ...]
"""Parameter names per bucket, in the order of the buckets."""


def reset_after_abort(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Forget everything about the step that was aborted: gradients, buckets in flight, gathered parameters.

    Raises:
        FrameworkUnsupported: this version of torch is not known to allow it; restart the processes instead.
    """
    modules = list(modules)
    for part in _parts(modules):
        if isinstance(part, DDP):
            _reset_ddp(part)
    _reset_fsdp(modules)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


def ddp_modules(modules: Iterable[nn.Module]) -> list[DDP]:
    """The DDP wrappers in ``modules``, in a stable order."""
    return [part for part in _parts(modules) if isinstance(part, DDP)]


def ddp_layout(ddp: DDP) -> DdpLayout:
    """How the gradients lie in buckets now; plain data that can be sent to a newcomer."""
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    try:
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    except AttributeError as error:
        raise _unknown("DDP", "Reducer._get_zeros_like_grad_buckets") from error
    ordered = sorted(buckets, key=lambda bucket: int(bucket.index()))
    return tuple(tuple(names[id(parameter)] for parameter in bucket.parameters()) for bucket in ordered)


def arrange_ddp_buckets(ddp: DDP) -> bool:
    """Rearrange the buckets now if DDP is going to at its next forward pass; on all ranks together.

    Called at the end of each step, before its state is saved, this makes the layout a part of that state: the first
    step runs with the first arrangement and all later ones with the second, also when a step has to be repeated.

    Returns:
        True when the layout may have changed.
    """
    if not ddp.reducer._rebuild_buckets():
        return False
    ddp._has_rebuilt_buckets = True
    return True


def adopt_ddp_layout(ddp: DDP, layout: DdpLayout) -> bool:
    """Arrange the buckets like ``layout`` (of a survivor), without anybody else's help.

    DDP is made to rearrange its buckets as after a first step: a made-up backward pass marks all gradients ready,
    and where DDP would ask rank 0 for the arrangement, a stand-in group answers with the wanted one.

    Returns:
        False when the buckets lay like that already.

    Raises:
        FrameworkUnsupported: DDP cannot be brought to this layout.
    """
    layout = tuple(tuple(bucket) for bucket in layout)
    if ddp_layout(ddp) == layout:
        return False
    if ddp.static_graph:
        raise FrameworkUnsupported(
            "DDP with static_graph=True keeps what it saw in its first step, which a replacement has not seen; "
            "leave static_graph out to recover in process"
        )
    names = [name for name, parameter in ddp.module.named_parameters() if _reduced(ddp, name, parameter)]
    wanted = sorted(name for bucket in layout for name in bucket)
    if sorted(names) != wanted:
        raise FrameworkUnsupported(
            f"this process has {len(names)} parameters under DDP and the survivors have {len(wanted)}, or their names "
            "differ; build the same model on every rank"
        )
    position = {name: i for i, name in enumerate(names)}
    real = ddp.process_group
    script = _script(ddp, [[position[name] for name in bucket] for bucket in layout])
    _reset_ddp(ddp)
    ddp.reducer._update_process_group(script)
    try:
        _made_up_backward(ddp, names)
        ddp.reducer._rebuild_buckets()
    finally:
        ddp.reducer._update_process_group(real)
        _reset_ddp(ddp)
        for parameter in ddp.module.parameters():
            parameter.grad = None
    found = ddp_layout(ddp)
    if found != layout:
        raise FrameworkUnsupported(
            f"DDP has {len(found)} buckets after rearranging where the survivors have {len(layout)}, or in another "
            "order (find_unused_parameters=True keeps the first arrangement for ever)"
        )
    return True


# -------------------------------------------------------------------- DDP


def _reset_ddp(ddp: DDP) -> None:
    reducer: Any = ddp.reducer
    try:
        reducer._reset_state()
    except AttributeError as error:
        raise _unknown("DDP", "Reducer._reset_state") from error
    # All ranks rearrange their buckets again after the next step, together, and find the same arrangement.
    ddp._has_rebuilt_buckets = False
    ddp._static_graph_delay_allreduce_enqueued = False


def _reduced(ddp: DDP, name: str, parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and name not in ddp.parameters_to_ignore


def _made_up_backward(ddp: DDP, names: Sequence[str]) -> None:
    parameters = dict(ddp.module.named_parameters())
    ddp.reducer.prepare_for_backward([])
    with torch.enable_grad():
        total = sum(parameters[name].flatten()[:1].sum().to("cpu", torch.float32) * 0.0 for name in names)
        assert isinstance(total, Tensor)
        total.backward()  # type: ignore[no-untyped-call]


class _Script(StandIn):
    """A stand-in whose broadcasts deliver a bucket arrangement, in the form in which DDP's rank 0 sends it.

    First the parameter positions of all buckets one after another and the number of buckets, then the size of each
    bucket; both as 32-bit integers (``Reducer::sync_bucket_indices``).
    """

    def __init__(self, rank: int, size: int, buckets: Sequence[Sequence[int]]) -> None:
        super().__init__(rank, size)
        flat = [position for bucket in buckets for position in bucket]
        self._answers = [[*flat, len(buckets)], [len(bucket) for bucket in buckets]]

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> DoneWork:
        answer = self._answers.pop(0) if self._answers else []
        if tensors[0].dtype != torch.int32 or tensors[0].numel() != len(answer):
            raise FrameworkUnsupported(
                f"DDP of torch {torch.__version__} agrees on its buckets in a way that is not known here; restart "
                "the processes instead of recovering in process"
            )
        with torch.no_grad():
            tensors[0].copy_(torch.tensor(answer, dtype=torch.int32))
        return DoneWork(list(tensors))


def _script(ddp: DDP, buckets: Sequence[Sequence[int]]) -> SwapGroup:
    rank, size = dist.get_rank(ddp.process_group), dist.get_world_size(ddp.process_group)
    meter = Meter()
    group = SwapGroup("ddp-layout", rank, range(size), world=False, meter=meter)
    group.swap(Circuit("ddp-layout", _Script(rank, size, buckets), meter))
    return group


# -------------------------------------------------------------------- FSDP2


def _reset_fsdp(modules: Iterable[nn.Module]) -> None:
    states = _fsdp_states(modules)
    if not states:
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for state in states:
        for group in _param_groups(state):
            _forget_step(group)
    for state in states:
        if state._is_root and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()
    for state in states:
        # What torch before 2.13 has no function for; a repetition otherwise.
        _forget_comm(state._comm_ctx)
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        for group in _param_groups(state):
            group._training_state = TrainingState.IDLE
            group._to_sharded()
            if not group.is_sharded:
                raise FrameworkUnsupported("FSDP2 parameters did not go back to their shards; restart the processes")


def _fsdp_states(modules: Iterable[nn.Module]) -> list[Any]:
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return []
    found = [part for part in _parts(modules) if isinstance(part, FSDPModule)]
    try:
        states: dict[int, Any] = {}
        for part in found:
            state = part._get_fsdp_state()
            states[id(state)] = state
        for state in states.values():
            _ = state._comm_ctx, state._state_ctx, state._is_root, _param_groups(state)
    except AttributeError as error:
        raise _unknown("FSDP2", str(error)) from error
    return list(states.values())


def _param_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has at most one
        one = state._fsdp_param_group
        groups = [] if one is None else [one]
    return list(groups)


def _forget_step(group: Any) -> None:
    """Drop what is in flight without waiting for it: it was aborted and would only raise."""
    group._all_gather_result = None
    group._post_reduce_event = None
    group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    if hasattr(group, "_all_reduce_state"):
        group._all_reduce_state = None
    group._post_forward_indices.clear()
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        if getattr(param, "_unsharded_param", None) is not None:
            param._unsharded_param.grad = None
        param.grad_offload_event = None


def _forget_comm(context: Any) -> None:
    if not hasattr(context, "post_forward_order"):
        return  # no forward pass yet
    context.post_forward_order.clear()
    if hasattr(context, "all_gather_state"):
        context.all_gather_state = None
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states.clear()
    elif hasattr(context, "reduce_scatter_state"):
        context.reduce_scatter_state = None


# -------------------------------------------------------------------- common


def _parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    seen: dict[int, nn.Module] = {}
    for module in modules:
        for part in module.modules():
            seen.setdefault(id(part), part)
    return list(seen.values())


def _unknown(what: str, name: str) -> FrameworkUnsupported:
    return FrameworkUnsupported(
        f"{what} of torch {torch.__version__} lacks {name}, which in-process recovery needs; use a torch from 2.6 on "
        "that is known to work, or run without keepstep.init()"
    )
