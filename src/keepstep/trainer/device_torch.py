"""Device: copies from a CUDA device into mapped memory on a stream of their own.

The destination is registered with the driver, so that the copy engine writes to it while kernels run. An optimizer
does not wait on the host: its stream waits for the copy's event. Tests drive this through a double of ``torch.cuda``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_REGISTER_DEFAULT = 0


class DeviceJob:
    """Copies that a device has been given; same verbs as a ``copier_torch.Job``."""

    def __init__(self, cuda: Any, event: Any, keep: Sequence[Tensor]) -> None:
        self._cuda, self._event = cuda, event
        self._keep = keep
        self.intact = True

    @property
    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        """Until the bytes are in host memory."""
        self._event.synchronize()

    def hold(self) -> None:
        """Let what is launched from here on wait for the copy, without waiting on the host."""
        self._cuda.current_stream().wait_event(self._event)


class Device:
    """One process's side stream.

    Args:
        cuda: ``torch.cuda``, or a double of it.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._stream: Any = None
        self._said = False

    def pin(self, address: int, size: int) -> bool:
        """Let the device write there by itself. Copies into memory that cannot be pinned work, but make others wait."""
        code = int(self._cuda.cudart().cudaHostRegister(address, size, _REGISTER_DEFAULT))
        if code and not self._said:
            self._said = True
            print(
                f"keepstep: snapshot memory of {size} bytes could not be pinned (cudaHostRegister: {code}); copies "
                f"will be slower. Raise the limit of locked memory (ulimit -l)",
                file=sys.stderr,
                flush=True,
            )
        return code == 0

    def unpin(self, address: int) -> None:
        self._cuda.cudart().cudaHostUnregister(address)

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> DeviceJob:
        """Copy each source to its target once the present stream has come to this point."""
        if self._stream is None:
            self._stream = self._cuda.Stream()
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                if source.device.type != "cpu":
                    source.record_stream(self._stream)  # its memory is not given to anybody else before that
        event = self._cuda.Event()
        event.record(self._stream)
        return DeviceJob(self._cuda, event, [source for _, source in pairs])
