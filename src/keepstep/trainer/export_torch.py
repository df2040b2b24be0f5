"""Export and import: generations as ``torch.distributed.checkpoint`` (DCP) folders, so that a run can come and go.

An export is what ``dcp.save({"model": get_model_state_dict(...), "optimizer": get_optimizer_state_dict(...)})`` would
have written, under the registered names; ``dcp.load`` reads it into the user's own state dict, in any layout. DCP keeps
what is no tensor as pickle: import only what you trust.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from keepstep.checkpoint import imported
from keepstep.checkpoint.exceptions import CheckpointError
from keepstep.checkpoint.generation import Manifest
from keepstep.checkpoint.slot import TensorEntry, Version, lay_out
from keepstep.checkpoint.staging import STAGE, staged
from keepstep.checkpoint.whole import Whole, WholeTensor
from keepstep.ports.tier import Tier
from keepstep.trainer.plain_torch import decode_plain, encode_plain

Progress = Callable[[int], None]
PIECE = 16 * 1024 * 1024
"""Bytes of a tensor that are written at a time."""
TOGETHER = "tensors"
"""File beside the export in which tensors are put together before DCP writes them; gone afterwards."""


# -------------------------------------------------------------------- export


def export(
    whole: Whole,
    directory: Path,
    *,
    weights_only: bool = False,
    progress: Progress | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> int:
    """Write a generation as a DCP folder, all of it or nothing, and return its tensors' bytes.

    Args:
        told: hears of what an interrupted export had left there.

    Raises:
        CheckpointError: the folder holds something already, or a tensor cannot be put together.
    """
    with staged(directory, told) as files:
        if any(path.name != STAGE for path in directory.iterdir()):
            raise CheckpointError(f"{directory} is not empty; name an empty directory for the export")
        return _export(whole, files, weights_only, progress)


def _export(whole: Whole, directory: Path, weights_only: bool, progress: Progress | None) -> int:
    wanted = [one for one in whole.tensors if not (weights_only and one.kind == "o")]
    offsets, size = lay_out([one.nbytes for one in wanted])
    together = directory.parent / TOGETHER
    try:
        memory = _mapped(together, size)
        whole.fill(list(zip(wanted, offsets, strict=True)), memory.numpy().data, progress)
        tensors = [(one, _view(memory, one, offset)) for one, offset in zip(wanted, offsets, strict=True)]
        with warnings.catch_warnings():  # that this is one process is meant
            warnings.simplefilter("ignore", UserWarning)
            save(_tree(whole, tensors, weights_only), checkpoint_id=str(directory), no_dist=True)
    except CheckpointException as error:  # no Exception, and shows whole tracebacks
        causes = "; ".join(str(cause) for cause, _ in error.failures.values())
        raise CheckpointError(f"{directory.parent.parent} cannot be written as a DCP folder: {causes}") from error
    finally:
        together.unlink(missing_ok=True)
    return sum(one.nbytes for one in wanted)


def _mapped(path: Path, size: int) -> Tensor:
    """A file as memory: the page cache holds what fits, the disk the rest."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
    except OSError as error:
        raise CheckpointError(f"{path.parent}: no room for {size} bytes beside the export: {error.strerror}") from error
    return torch.from_file(str(path), shared=True, size=max(1, size), dtype=torch.uint8)


def _view(memory: Tensor, one: WholeTensor, offset: int) -> Tensor:
    dtype = getattr(torch, one.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{one.name} has dtype {one.dtype}, which this torch does not know")
    if not one.nbytes:
        return torch.empty(one.shape, dtype=dtype)
    return memory[offset : offset + one.nbytes].view(dtype).reshape(one.shape)


def _tree(whole: Whole, tensors: Sequence[tuple[WholeTensor, Tensor]], weights_only: bool) -> dict[str, Any]:
    """The nested state dict, as torch's own functions would have made it."""
    tree: dict[str, Any] = {}
    for one, tensor in tensors:
        if one.kind != "o":
            tree.setdefault(one.of, {})[one.name] = tensor
        else:
            optimizer = tree.setdefault(one.of, {"state": {}, "param_groups": []})
            optimizer["state"].setdefault(one.name, {})[one.state] = tensor
    if weights_only:
        return tree
    plain = decode_plain(whole.parts[0].plain)
    owners: dict[str, list[list[str]]] = msgspec.msgpack.decode(plain.get("owners") or b"\x80")
    for name, groups in plain["groups"].items():
        optimizer = tree.setdefault(name, {"state": {}, "param_groups": []})
        named = owners.get(name, [])
        for number, group in enumerate(groups):
            of = named[number] if number < len(named) else []
            called = [owner.split("/", 1)[1] if owner else f"#{number}/{i}" for i, owner in enumerate(of)]
            optimizer["param_groups"].append({**group, "params": called})
        for path, values in plain["values"].get(name, {}).items():
            group_at, index = map(int, path.split("/"))
            if group_at < len(named) and index < len(named[group_at]) and named[group_at][index]:
                owner = named[group_at][index].split("/", 1)[1]
                optimizer["state"].setdefault(owner, {}).update(values)
    for name, value in plain["others"].items():
        tree.setdefault(name, value)
    return tree


# -------------------------------------------------------------------- import


def import_dcp(
    directory: Path,
    tier: Tier,
    *,
    step: int,
    job: str,
    model: str = "model",
    optimizer: str = "optimizer",
    also: Sequence[str] = (),
    progress: Progress | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """A generation out of a DCP folder that holds ``{"model": ..., "optimizer": ...}`` or the like.

    Args:
        model, optimizer: names in the folder, under which the script has to register them.
        also: further entries to take along, registered under the same names (``scheduler``).

    Raises:
        CheckpointError: no such folder, entry or layout.
    """
    tree = _read(directory, (model, optimizer, *also))
    weights = tree.get(model)
    if not isinstance(weights, dict) or not any(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(
            f"{directory} holds no tensors under {model!r} but {', '.join(sorted(map(str, tree))) or 'nothing'}; say "
            f"--model NAME"
        )
    found: list[tuple[str, Tensor]] = [
        (f"p/{model}/{name}", value) for name, value in sorted(weights.items()) if isinstance(value, Tensor)
    ]
    groups: dict[str, Any] = {}
    values: dict[str, Any] = {}
    owners: dict[str, list[list[str]]] = {}
    if optimizer in tree:
        state, groups[optimizer], values[optimizer], owners[optimizer] = _optimizer(tree[optimizer], model, optimizer)
        found += state
    plain = {
        "groups": groups,
        "values": values,
        "others": {name: tree[name] for name in also},
        "random": None,
        "buckets": msgspec.msgpack.encode([]),
        "owners": msgspec.msgpack.encode(owners),
    }
    return imported.write(
        tier,
        Version(step, 0),
        _Tensors(found),
        job=job,
        plain=encode_plain(plain, str(directory)),
        progress=progress,
        told=told,
    )


def _read(directory: Path, names: Sequence[str]) -> dict[str, Any]:
    if not os.path.isfile(directory / ".metadata"):
        raise CheckpointError(f"{directory} is no DCP folder: there is no .metadata in it")
    reader = FileSystemReader(str(directory))
    try:
        known = reader.read_metadata().state_dict_metadata
        keys = {key for key in known if key.split(".", 1)[0] in names}
        tops = {key.split(".", 1)[0] for key in known}
        if absent := [name for name in names[2:] if name not in tops]:
            raise CheckpointError(f"{directory} holds no {absent[0]!r} but {', '.join(sorted(tops))}")
        if not any(isinstance(known[key], TensorStorageMetadata) for key in keys):
            return dict.fromkeys(tops)
        tree: dict[str, Any] = {}
        planner = _EmptyStateDictLoadPlanner(keys=keys)  # type: ignore[no-untyped-call]
        _load_state_dict(tree, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointError:
        raise
    except Exception as error:  # DCP raises whatever its unpickler, planner or storage came upon
        raise CheckpointError(f"{directory} cannot be read as a DCP folder: {error}") from error
    return dict.fromkeys(tops) | tree  # those that were not asked for by name only


def _optimizer(
    saved: Any, model: str, name: str
) -> tuple[list[tuple[str, Tensor]], list[Any], dict[str, Any], list[list[str]]]:
    """Tensors, groups, plain values and owners, from either of torch's two layouts."""
    if not isinstance(saved, dict) or not isinstance(saved.get("param_groups"), list):
        raise CheckpointError(
            f"{name!r} is no optimizer's state with state and param_groups (flatten_optimizer_state_dict is not "
            f"supported); save it unflattened, or import without it (--optimizer '')"
        )
    state = saved.get("state", {})
    tensors: list[tuple[str, Tensor]] = []
    groups: list[Any] = []
    owners: list[list[str]] = []
    values: dict[str, Any] = {}
    for g, group in enumerate(saved["param_groups"]):
        groups.append({key: value for key, value in group.items() if key not in ("params", "param_names")})
        owners.append([f"{model}/{one}" if isinstance(one, str) else "" for one in group["params"]])
        for i, one in enumerate(group["params"]):
            # DCP makes words of the numbers that torch counts parameters by.
            for key, value in sorted(state.get(one, state.get(str(one), {})).items()):
                if isinstance(value, Tensor):
                    tensors.append((f"o/{name}/{g}/{i}/{key}", value))
                else:
                    values.setdefault(f"{g}/{i}", {})[key] = value
    return tensors, groups, values, owners


class _Tensors:
    """Tensors as a payload."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._tensors = [tensor for _, tensor in tensors]
        entries, offset = [], 0
        for name, tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            like = "plain" if name[0] == "o" else "param"
            entries.append(TensorEntry(name, dtype, tuple(tensor.shape), offset, tensor.nbytes, like))
            offset += tensor.nbytes
        self.entries, self.size = tuple(entries), offset

    def __iter__(self) -> Iterator[memoryview]:
        for tensor in self._tensors:
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, len(flat), PIECE):
                piece = bytearray(min(PIECE, len(flat) - start))
                torch.frombuffer(piece, dtype=torch.uint8).copy_(flat[start : start + PIECE])
                yield memoryview(piece)
