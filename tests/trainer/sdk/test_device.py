"""Copies from a device, on a double of ``torch.cuda``: what waits for what. No real device is used here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepstep.checkpoint.slot import Version
from keepstep.trainer import writer_torch
from keepstep.trainer.device_torch import Device, DeviceJob
from keepstep.trainer.snapshots_torch import Snapshots
from keepstep.trainer.state_torch import State


class Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.copies = cuda, 0

    def record(self, stream: str) -> None:
        self.copies = len(self._cuda.due)
        self._cuda.log.append(f"record on {stream}")

    def query(self) -> bool:
        return not self._cuda.due[: self.copies]

    def synchronize(self) -> None:
        """The host waits: everything before the event really happens."""
        for work in self._cuda.due[: self.copies]:
            work()
        del self._cuda.due[: self.copies]
        self.copies = 0


class Stream(str):
    cuda: FakeCuda

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self} waits for {other}")

    def wait_event(self, event: Event) -> None:
        self.cuda.log.append(f"{self} waits for the copy")
        event.synchronize()  # what the kernels launched after this see


class FakeCuda:
    """Copies are only queued until an event is waited for."""

    def __init__(self, refuse: bool = False) -> None:
        self.log: list[str] = []
        self.due: list[Any] = []
        self.pinned: dict[int, int] = {}
        self._refuse = refuse

    def _stream(self, name: str) -> Stream:
        stream = Stream(name)
        stream.cuda = self
        return stream

    def Stream(self) -> Stream:
        return self._stream("side")

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self) -> Stream:
        return self._stream("main")

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:
        if not self._refuse:
            self.pinned[address] = size
        return 2 if self._refuse else 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


class OnDevice:
    """Lets ``writer_torch`` take every tensor for one of a device, and queues its copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
        real = writer_torch._Part.__init__

        def parted(part: Any, targets: list[Tensor], sources: list[Tensor]) -> None:
            real(part, targets, sources)
            part.device, part.chunks = list(zip(targets, sources, strict=True)), []

        monkeypatch.setattr(writer_torch._Part, "__init__", parted)
        monkeypatch.setattr(Device, "start", lambda _, pairs: self._start(pairs))
        pin = writer_torch.Writer._pin_if
        monkeypatch.setattr(writer_torch.Writer, "_pin_if", lambda writer, _: pin(writer, True))
        self.cuda = cuda

    def _start(self, pairs: Any) -> DeviceJob:
        cuda = self.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        cuda.due.extend(lambda t=target, s=source: t.copy_(s.detach()) for target, source in pairs)
        event = cuda.Event()
        event.record(side)
        return DeviceJob(cuda, event, [])


def training(directory: Path, cuda: FakeCuda) -> tuple[nn.Module, torch.optim.Optimizer, State, Snapshots]:
    model = nn.Linear(5, 5, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.ones(5, 5)
    state = State()
    state.register({"model": model, "optimizer": optimizer}, None)
    state.bind()
    keep = Snapshots(directory / "snap", 0, directory / "keeper.sock")
    keep._device = Device(cuda)
    keep.overlap_from = 0
    keep._copier.give = lambda work: None  # type: ignore[method-assign]  # the test says when the helper runs
    keep.watch(state)
    return model, optimizer, state, keep


def test_the_optimizers_stream_waits_and_the_host_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit returns with nothing copied; kernels of the next optimizer step come behind the copy; the version
    counts when the helper has seen the event, with the values of the commit."""
    cuda = FakeCuda()
    OnDevice(monkeypatch, cuda)
    model, optimizer, state, keep = training(tmp_path, cuda)
    before = model.weight.detach().clone()
    keep.save(state, Version(1, 1), key="k", full=True, ring=False, overlap=True)
    assert cuda.due, "the copy was waited for"
    assert cuda.log[:2] == ["side waits for main", "record on side"]
    waited = keep.waited_s
    optimizer.step()
    assert "main waits for the copy" in cuda.log
    assert keep.waited_s == waited
    assert keep._full.versions() == ()
    assert keep._flight is not None
    keep._flight.run()
    assert keep.full() == (Version(1, 1),)
    monkeypatch.undo()
    keep.load(state, Version(1, 1), shards=True)
    assert torch.equal(model.weight, before)


def test_buffers_do_not_wait_for_the_copy_of_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's buffers are copied before the commit returns; the large rest is only behind them in the stream."""
    cuda = FakeCuda()
    OnDevice(monkeypatch, cuda)
    model, _, state, keep = training(tmp_path, cuda)
    model.register_buffer("mean", torch.full((3,), 7.0))
    keep.save(state, Version(1, 1), key="k", full=True, ring=False, overlap=True)
    assert len(cuda.due) == 1, "the parameter's copy was waited for"
    assert keep._flight is not None
    keep._flight.run()
    monkeypatch.undo()
    model.mean.zero_()  # type: ignore[operator,union-attr]
    keep.load(state, Version(1, 1), shards=False)
    assert model.mean.tolist() == [7.0, 7.0, 7.0]  # type: ignore[operator,union-attr]


def test_the_mapped_file_is_pinned_once_and_anew_when_it_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One registration per file; a file that grew gives the old one back first."""
    cuda = FakeCuda()
    OnDevice(monkeypatch, cuda)
    _, _, state, keep = training(tmp_path, cuda)
    for step in range(1, 5):
        keep.save(state, Version(step, 1), key="k", full=True, ring=False)
    assert len(cuda.pinned) == 2
    slot = keep._full.slots[0]
    slot.grow(slot.size * 3)
    keep.save(state, Version(5, 1), key="k", full=True, ring=False)
    keep.save(state, Version(6, 1), key="k", full=True, ring=False)
    assert len(cuda.pinned) == 2
    assert slot.size in cuda.pinned.values()


def test_memory_that_cannot_be_pinned_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Copies go on; the message names the way out."""
    device = Device(FakeCuda(refuse=True))
    assert not device.pin(4096, 100)
    assert not device.pin(8192, 100)
    assert capsys.readouterr().err.count("ulimit -l") == 1


def test_a_real_start_queues_behind_the_present_stream() -> None:
    """Wait for what has been launched, copy on the side stream, record behind it: in this order."""
    cuda = FakeCuda()
    target, source = torch.zeros(3), torch.ones(3)
    job = Device(cuda).start([(target, source)])
    assert cuda.log == ["side waits for main", "record on side"]
    job.wait()
    assert job.done
    assert torch.equal(target, source)
