"""State: what makes a rank's training state, read and put back in place.

Tensors are parameters, buffers and the optimizers' own; everything else (hyper-parameters, schedulers, random states,
data position) is small and plain. Parameters and optimizer tensors are looked at as their local shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from keepstep.checkpoint.slot import TensorEntry
from keepstep.trainer import pieces_torch as pieces
from keepstep.trainer.exceptions import StateMismatch, StepMisused
from keepstep.trainer.frameworks_torch import DdpLayout, adopt_ddp_layout, ddp_layout
from keepstep.trainer.pieces_torch import Live as Live
from keepstep.trainer.plain_torch import decode_plain, encode_plain
from keepstep.trainer.random_torch import put_random_states, random_states

Read = Callable[[TensorEntry], Tensor]
Copy = Callable[[list[Tensor], list[Tensor]], object]
"""Copies each of the second list's tensors into its place in the first."""


class State:
    """The registered objects. ``bind`` is called once, when the loop starts and everything is built."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.others: dict[str, Any] = {}
        self.touched = False
        """An optimizer has begun a step since the last commit: parameters may be half-done."""
        self._replicated: bool | None = None
        self._parameters: list[Live] = []
        self._shards: list[Live] = []
        self._shard_sources: list[tuple[dict[Any, Any], Any, Any]] = []
        self._bound: list[tuple[str, Tensor]] = []
        self._pointers: list[int] = []
        self._provable = False
        self._ddp: list[DistributedDataParallel] = []
        self._buckets: bytes | None = None
        self._names: dict[str, pieces.Names] = {}
        self._owners = b""

    # ---------------------------------------------------------------- registration

    def register(self, objects: Mapping[str, Any], replicated: bool | None) -> None:
        if replicated is not None:
            self._replicated = replicated
        for name, value in objects.items():
            several = isinstance(value, (list, tuple)) and not hasattr(value, "state_dict")
            for key, item in [(f"{name}{i}", v) for i, v in enumerate(value)] if several else [(name, value)]:
                self._add(key, item)

    def _add(self, name: str, item: Any) -> None:
        if name in self.modules or name in self.optimizers or name in self.others:
            raise StepMisused(f"register({name}=...): {name!r} is registered already; use another name")
        if isinstance(item, nn.Module):
            self.modules[name] = item
        elif isinstance(item, Optimizer):
            self.optimizers[name] = item
        elif callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None)):
            self.others[name] = item
        else:
            raise StepMisused(
                f"register({name}=...): a {type(item).__name__} has no state_dict() and load_state_dict(), so it could "
                f"not be rolled back; give it both, or leave it out if it holds no state"
            )

    @property
    def replicated(self) -> bool:
        """Whether any rank's parameters and optimizer state serve all ranks."""
        if self._replicated is not None:
            return self._replicated
        sharded = any(type(o).__name__ == "ZeroRedundancyOptimizer" for o in self.optimizers.values())
        return bool(self.ddp()) and not sharded

    def ddp(self) -> list[DistributedDataParallel]:
        return [
            module
            for root in self.modules.values()
            for module in root.modules()
            if isinstance(module, DistributedDataParallel)
        ]

    def bind(self) -> None:
        """Remember the parameters (they keep their identity from here on) and watch the optimizers."""
        self._names = {name: pieces.Names(module) for name, module in self.modules.items()}
        self._bound = [
            (f"p/{name}/{self._names[name](key)}", parameter)
            for name, module in self.modules.items()
            for key, parameter in module.named_parameters()
        ]
        self._parameters = self._look()
        called = {id(parameter): name[2:] for name, parameter in self._bound}
        self._owners = msgspec.msgpack.encode(
            {
                name: [[called.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
                for name, optimizer in self.optimizers.items()
            }
        )
        self._pointers = [live.tensor.data_ptr() for live in self._parameters]
        self._ddp = self.ddp()
        optimised = {id(p) for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        trained = {id(p) for m in self.modules.values() for p in m.parameters() if p.requires_grad}
        self._provable = trained <= optimised
        for optimizer in self.optimizers.values():
            optimizer.register_step_pre_hook(self._touch)

    def _touch(self, *_: Any) -> None:
        self.touched = True

    @property
    def provable(self) -> bool:
        """Whether every trained parameter is changed by a registered optimizer, and so by nothing between its steps."""
        return self._provable

    @property
    def clean(self) -> bool:
        """Parameters and optimizers are exactly as at the last commit: no optimizer has begun a step since.

        A trained parameter that no registered optimizer owns is changed by means we cannot see: then never.
        """
        return self._provable and not self.touched

    # ---------------------------------------------------------------- reading

    def shards(self) -> list[Live]:
        """Parameters and optimizer tensors. The same list object as long as nothing was replaced."""
        if self._pointers != [pieces.raw(parameter).data_ptr() for _, parameter in self._bound]:
            self._parameters = self._look()
            self._pointers = [live.tensor.data_ptr() for live in self._parameters]
            self._shards = []
        for holder, key, tensor in self._shard_sources:
            if holder.get(key) is not tensor:
                break
        else:
            if self._shards and self._count() == len(self._shard_sources):
                return self._shards
        sources: list[tuple[dict[Any, Any], Any, Any]] = []
        found = list(self._parameters)
        for name, optimizer in self.optimizers.items():
            for path, parameter, values in pieces.states(optimizer):
                for key, value in values.items():
                    sources.append((values, key, value))
                    if isinstance(value, Tensor):
                        like = pieces.likeness(value, parameter, name, key)
                        found.append(pieces.live(f"o/{name}/{path}/{key}", value, like))
        self._shards, self._shard_sources = pieces.spread(found, self.replicated, *_seat()), sources
        return self._shards

    def _look(self) -> list[Live]:
        return [pieces.live(name, parameter, "param") for name, parameter in self._bound]

    def _count(self) -> int:
        return sum(len(values) for o in self.optimizers.values() for values in o.state.values())

    def buffers(self) -> list[Live]:
        return [
            pieces.live(f"b/{name}/{self._names.get(name, str)(key)}", buffer, "buffer")
            for name, module in self.modules.items()
            for key, buffer in module.named_buffers()
        ]

    def plain(self, *, with_random: bool = True) -> bytes:
        """Everything that is not a tensor of its own, encoded. Raises ``StateNotPlain``."""
        whole = {
            "groups": {name: [pieces.hyper(group) for group in o.param_groups] for name, o in self.optimizers.items()},
            "values": {name: pieces.plain_values(optimizer) for name, optimizer in self.optimizers.items()},
            "others": {name: item.state_dict() for name, item in self.others.items()},
            "random": random_states() if with_random else None,
            "buckets": self._bucket_order(),
            "owners": self._owners,
        }
        return encode_plain(whole, "registered")

    def bound(self) -> Sequence[tuple[str, Tensor]]:
        """Parameters by the name under which versions hold them: the user's own, whatever wraps the module."""
        return self._bound

    def owners(self) -> bytes:
        """The parameter (``module/name``) at each optimizer's group and index, as msgpack."""
        return self._owners

    def settle_buckets(self) -> None:
        """Let DDP rearrange its buckets now, where it would at its next forward; collective, on all ranks alike.

        Which gradients are added up together decides the last bits of a sum. Settled before the commit, the order
        that the next step will use belongs to the version, and whoever resumes from it uses the same.
        """
        for ddp in self._ddp:
            if ddp.reducer._rebuild_buckets():
                ddp._has_rebuilt_buckets = True
                self._buckets = None

    def _bucket_order(self) -> bytes:
        if self._buckets is None:
            self._buckets = msgspec.msgpack.encode([ddp_layout(ddp) for ddp in self._ddp])
        return self._buckets

    def expected_bytes(self) -> int:
        """Size of one version once the optimizers have made their state, as far as can be known before."""
        there = sum(live.tensor.nbytes for live in self.shards()) + sum(live.tensor.nbytes for live in self.buffers())
        for optimizer in self.optimizers.values():
            if not optimizer.state:
                per = 1 if "momentum" in optimizer.defaults else 2
                if optimizer.defaults.get("momentum", 1) == 0:
                    per = 0
                there += per * sum(pieces.local(p).nbytes for g in optimizer.param_groups for p in g["params"])
        return there

    # ---------------------------------------------------------------- putting back

    def put_back(
        self,
        entries: tuple[TensorEntry, ...],
        read: Read,
        plain: bytes,
        *,
        shards: bool,
        copy: Copy = torch._foreach_copy_,
    ) -> None:
        """Make the live state equal to a version; ``shards`` false leaves parameters and optimizer tensors alone."""
        if shards:
            self.put_shards(entries, read, plain, copy=copy)
        with torch.no_grad():
            self._put_buffers([entry for entry in entries if entry.name[0] == "b"], read)
        self._put_plain(decode_plain(plain))

    def put_shards(
        self, entries: tuple[TensorEntry, ...], read: Read, plain: bytes, *, copy: Copy = torch._foreach_copy_
    ) -> None:
        """Parameters and optimizer state only."""
        with torch.no_grad():
            self._put_shards([e for e in entries if e.name[0] != "b"], read, decode_plain(plain)["values"], copy)

    def _put_shards(
        self, entries: list[TensorEntry], read: Read, values: dict[str, dict[str, Any]], copy: Copy
    ) -> None:
        made = {live.name: live.tensor for live in self._parameters}
        wanted = {entry.name for entry in entries if entry.name[0] == "p"}
        if wanted != made.keys():
            differing = sorted(wanted ^ made.keys())[:4]
            raise StateMismatch(f"the snapshot's parameters are not this model's: {', '.join(differing)} differ")
        slots = self._make_optimizer_state(entries, values)
        targets, sources = [], []
        for entry in entries:
            target = made.get(entry.name)
            if target is None:
                target = slots[entry.name]
            pieces.check(entry, target)
            targets.append(target)
            sources.append(read(entry))
        if targets:
            self.touched = True  # half-done, should the copy end early
            copy(targets, sources)
        self.touched = False

    def _make_optimizer_state(self, entries: list[TensorEntry], values: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
        """Bring every optimizer's state to exactly the keys of the version; return the local tensors by name."""
        wanted: dict[str, dict[str, dict[str, TensorEntry]]] = {}
        for entry in entries:
            if entry.name[0] == "o":
                _, name, group, index, key = entry.name.split("/", 4)
                wanted.setdefault(name, {}).setdefault(f"{group}/{index}", {})[key] = entry
        found: dict[str, Tensor] = {}
        for name, optimizer in self.optimizers.items():
            paths = {f"{g}/{i}": p for g, i, p in pieces.places(optimizer)}
            tensors, plain = wanted.pop(name, {}), values.get(name, {})
            if unknown := (tensors.keys() | plain.keys()) - paths.keys():
                raise StateMismatch(f"optimizer {name!r} has no parameter {sorted(unknown)[0]} that the snapshot knows")
            for path, parameter in paths.items():
                keys, extra = tensors.get(path, {}), plain.get(path, {})
                if not keys and not extra:
                    optimizer.state.pop(parameter, None)
                    continue
                held = optimizer.state[parameter]
                for stale in [key for key in held if str(key) not in keys and str(key) not in extra]:
                    del held[stale]
                for key, value in extra.items():
                    held[key] = value
                for key, entry in keys.items():
                    if not pieces.fits(held.get(key), entry):
                        held[key] = pieces.make(entry, parameter)
                    found[entry.name] = pieces.local(held[key])
        if wanted:
            raise StateMismatch(f"the snapshot holds an optimizer {sorted(wanted)[0]!r} that is not registered here")
        return found

    def _put_buffers(self, entries: list[TensorEntry], read: Read) -> None:
        held = {live.name: live.tensor for live in self.buffers()}
        for entry in entries:
            if entry.name not in held:
                raise StateMismatch(f"the snapshot holds buffer {entry.name[2:]} that this model does not have")
            pieces.check(entry, held[entry.name])
            held[entry.name].copy_(read(entry))

    def _put_plain(self, whole: dict[str, Any]) -> None:
        """Hyper-parameters, schedulers, data, DDP's bucket order and, where there are any, random states."""
        for name, groups in whole["groups"].items():
            if name not in self.optimizers:
                raise StateMismatch(f"the snapshot holds an optimizer {name!r} that is not registered here")
            for live, saved in zip(self.optimizers[name].param_groups, groups, strict=True):
                for key, value in saved.items():
                    if isinstance(live.get(key), Tensor) and isinstance(value, Tensor):
                        live[key].copy_(value)
                    else:
                        live[key] = value
        for name, saved in whole["others"].items():
            if name not in self.others:
                raise StateMismatch(f"the snapshot holds {name!r}, which is not registered here")
            self.others[name].load_state_dict(saved)
        layouts = msgspec.msgpack.decode(whole["buckets"], type=list[DdpLayout])
        for ddp, layout in zip(self._ddp, layouts, strict=bool(layouts)):
            if adopt_ddp_layout(ddp, layout):
                self._buckets = None
        if whole["random"] is not None:
            put_random_states(whole["random"])


def _seat() -> tuple[int, int]:
    """This process's rank and the world's size."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
