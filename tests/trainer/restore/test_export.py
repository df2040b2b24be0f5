"""A run can come and go: DCP and safetensors folders, read by torch and safetensors themselves, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict

from keepstep.checkpoint import catalog, imported
from keepstep.checkpoint import export_safetensors as folder
from keepstep.checkpoint.exceptions import CheckpointError, ManifestDamaged
from keepstep.checkpoint.export_safetensors import Folder
from keepstep.checkpoint.reader import Reader
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.directory import DirectoryTier
from keepstep.checkpoint.tiers.memory import MemoryTier
from keepstep.checkpoint.whole import Whole
from keepstep.trainer import export_torch
from tests.trainer.restore.test_restore_worlds import Worlds
from tests.trainer.sdk.zygote import Zygote


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """As the ranks of ``world_script`` build it."""
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    heads = [p for n, p in model.named_parameters() if "bias" in n]
    bodies = [p for n, p in model.named_parameters() if "bias" not in n]
    return model, torch.optim.AdamW([{"params": bodies}, {"params": heads, "lr": 1e-3}], lr=1e-2)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model, optimizer = build()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def raw(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), tensor.detach().reshape(-1).view(torch.uint8).tolist()]


@pytest.fixture(scope="module")
def saved(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two FSDP2 ranks have saved three steps; what the last one was."""
    root = tmp_path_factory.mktemp("saved")
    shown = Worlds(zygote, root).run("save", "fsdp", 2, SHARED=str(root / "shared"))
    return root / "shared", shown[0]["3"]


def whole(path: Path, step: int = 3) -> Whole:
    return Whole(Reader([DirectoryTier(path)], Version(step, 1)))


def test_torch_loads_an_export_into_a_plain_model(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """``dcp.load`` with torch's own state dict functions: parameters, buffers, moments, learning rates."""
    source, shown = saved
    export_torch.export(whole(source), tmp_path / "dcp")
    assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == [".metadata", "__0_0.distcp"]
    model, optimizer = trained()
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, parameter in model.named_parameters():
        assert raw(parameter) == shown["tensors"][f"p/{name}"]
        for key, value in optimizer.state[parameter].items():
            assert raw(value) == shown["tensors"][f"o/{name}/{key}"]
    for name, buffer in model.named_buffers():
        assert raw(buffer) == shown["buffers"][name]
    assert [group["lr"] for group in optimizer.param_groups] == shown["lr"]


def test_safetensors_loads_an_export(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The library's own reader, weights over several files with an index, and optimizer state by parameter."""
    source, shown = saved
    done = folder.export(whole(source), tmp_path, file_bytes=150)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    tensors: dict[str, torch.Tensor] = {}
    for name in done.files:
        tensors |= load_file(tmp_path / name)
    expected = {name[2:].replace("/", "."): value for name, value in shown["tensors"].items()}
    assert {name: raw(tensor) for name, tensor in tensors.items()} == expected | shown["buffers"]
    with pytest.raises(CheckpointError, match=r"holds .* already"):
        folder.export(whole(source), tmp_path)


@pytest.mark.parametrize("layout", ["by name", "by number"])
def test_a_dcp_folder_becomes_a_generation_that_ranks_go_on_from(zygote: Zygote, tmp_path: Path, layout: str) -> None:
    """Written by ``dcp.save`` from a plain model, restored by two FSDP2 ranks: every bit, learning rates included."""
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.25
    by_name = layout == "by name"
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer) if by_name else optimizer.state_dict(),
    }
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    tier = DirectoryTier(tmp_path / "shared", create=True)
    export_torch.import_dcp(tmp_path / "dcp", tier, step=1200, job="old")
    assert catalog.look(tier, Version(1200, 0)).verified
    got = Worlds(zygote, tmp_path).run("restore", "fsdp", 2, SHARED=str(tmp_path / "shared"))
    assert "error" not in got[0], got[0]
    assert got[0]["step"] == 1200
    for name, parameter in model.named_parameters():
        assert got[1]["tensors"][f"p/{name}"] == raw(parameter)
        for key, value in optimizer.state[parameter].items():
            assert got[1]["tensors"][f"o/{name}/{key}"] == raw(value)
    assert got[0]["buffers"] == {name: raw(buffer) for name, buffer in model.named_buffers()}
    assert got[0]["lr"] == [0.25, 1e-3]


def test_a_folder_of_weights_becomes_a_generation(tmp_path: Path) -> None:
    model, _ = trained()
    (tmp_path / "in").mkdir()
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "in" / "model.safetensors")
    tier = DirectoryTier(tmp_path / "out", create=True)
    payload = Folder(folder.look(tmp_path / "in"), "model")
    imported.write(tier, Version(7, 0), payload, job="old", plain=imported.plain())
    found = Whole(Reader([tier], Version(7, 0)))
    folder.export(found, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {name: raw(value) for name, value in again.items()} == {name: raw(value) for name, value in state.items()}
    with pytest.raises(CheckpointError, match="holds step 7 already"):
        imported.write(tier, Version(7, 0), payload, job="old", plain=imported.plain())


def test_a_copy_needs_no_base(tmp_path: Path) -> None:
    """The end of a chain of differences, written elsewhere in full, stands alone and is the same."""
    from tests.checkpoint import durable_made as made

    chain = MemoryTier()
    first, entries = made.payload_of({"p/m/a": np.arange(1000, dtype="float32")})
    second, _ = made.payload_of({"p/m/a": np.arange(1000, dtype="float32") + 1})
    made.complete(chain, Version(1, 1), [made.write_part(chain, Version(1, 1), 0, first, entries)])
    part = made.write_part(chain, Version(2, 1), 0, second, entries, base=(Version(1, 1), first))
    made.complete(chain, Version(2, 1), [part])
    tier = DirectoryTier(tmp_path / "full", create=True)
    imported.copy(Reader([chain], Version(2, 1)), tier)
    (there,) = catalog.read(tier)
    assert (there.version, there.verified, there.bases) == (Version(2, 1), True, ())
    assert bytes(Reader([tier], Version(2, 1)).stretch(0, 0, len(second))) == second


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is not a safetensors file"),
        (b"\xff" * 64, "is not a safetensors file"),
        (b"\x02" + b"\0" * 7 + b"[]", "not a readable"),
        (b'\x3b\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}     ', "does not fit its place"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        folder.look(tmp_path)
    assert issubclass(ManifestDamaged, CheckpointError)


def test_what_is_no_dcp_folder_is_refused(tmp_path: Path) -> None:
    tier = MemoryTier()
    with pytest.raises(CheckpointError, match="is no DCP folder"):
        export_torch.import_dcp(tmp_path, tier, step=1, job="j")
    dcp.save({"weights": {"a": torch.ones(2)}}, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    with pytest.raises(CheckpointError, match=r"no tensors under 'model' but weights; say --model NAME"):
        export_torch.import_dcp(tmp_path / "d", tier, step=1, job="j")
    with pytest.raises(CheckpointError, match="holds no 'scheduler' but weights"):
        export_torch.import_dcp(tmp_path / "d", tier, step=1, job="j", model="weights", also=("scheduler",))
