"""One generation of one group's communication: a real backend, what is in flight on it, and how it ends.

Gloo does not promise that a broken operation ever returns: shutting its connections down frees most waiters within
milliseconds, yet some stay until the group's timeout. So nobody waits on gloo alone. A Python waiter looks up every
``SLICE`` to see whether the circuit was cut; a waiter in C++ (DDP's reducer) waits on a future of ours, which
``cut`` completes with an error whatever gloo does.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final

from torch import distributed as dist
from torch.futures import Future

from keepstep.trainer.exceptions import CommunicationAborted
from keepstep.trainer.flight import Track
from keepstep.trainer.meter import Meter
from keepstep.trainer.sockets import Handle, shut_down
from keepstep.trainer.waiters import Waiters
from keepstep.trainer.waits import WAITS

SLICE: Final = timedelta(milliseconds=20)
"""How long a waiter trusts gloo before it looks whether the circuit has been cut."""

WAITERS: Final = 8
"""Threads per circuit that wait for what gloo gives no future for (point to point); started on first use."""

_INC_REF = ctypes.pythonapi.Py_IncRef
_DEC_REF = ctypes.pythonapi.Py_DecRef
for _function in (_INC_REF, _DEC_REF):
    _function.argtypes = [ctypes.py_object]
    _function.restype = None


class Circuit:
    """A backend in use, until it is cut (for good) or dropped (in good order)."""

    def __init__(self, name: str, backend: Any, meter: Meter, connections: tuple[Handle, ...] = ()) -> None:
        self.name = name
        self.backend = backend
        self.meter = meter
        self.cut_because: str | None = None
        self._connections = connections
        self._lock = threading.Lock()
        self._flying: set[Any] = set()
        self._elsewhere: set[threading.Event] = set()
        self._promises: dict[int, tuple[Future[Any], CircuitWork]] = {}
        self._waiters: Waiters | None = None

    # ------------------------------------------------------------------ use

    def check(self) -> None:
        """Raise if the circuit has been cut."""
        if self.cut_because is not None:
            raise self.error()

    def error(self) -> CommunicationAborted:
        return CommunicationAborted(f"communication of group {self.name} was aborted: {self.cut_because}")

    def took_off(self, work: Any) -> None:
        self._flying.add(work)

    def landed(self, work: Any) -> None:
        self._flying.discard(work)

    def wait(self, work: Any, timeout: timedelta | None) -> None:
        """Wait for a collective, but never longer than the circuit lives."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError:
                self.check()
                if work.is_completed():
                    work.wait()  # raises what really happened; or it completed just after the slice
                    return
            if deadline is not None and time.monotonic() > deadline:
                raise RuntimeError("Operation timed out!")

    def wait_elsewhere(self, work: Any, timeout: timedelta | None) -> None:
        """Wait for what cannot be waited for in slices: gloo ignores the timeout, or breaks its connections on it."""
        if work.is_completed():
            work.wait()
            return
        done = threading.Event()
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                work.wait()
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()
                self._elsewhere.discard(done)

        self._elsewhere.add(done)
        self._pool().submit(wait)
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        while not done.wait(SLICE.total_seconds()):
            self.check()
            if deadline is not None and time.monotonic() > deadline:
                raise RuntimeError("Operation timed out!")
        self.check()
        if errors:
            raise errors[0]

    def promise(self, handle: CircuitWork) -> Future[Any]:
        """A future that follows ``handle`` and fails at once when the circuit is cut."""
        inner: Future[Any] = Future()
        # set_exception() of torch futures only stores a value that C++ waiters take for success; raising inside
        # then() makes a real error.
        outer: Future[Any] = inner.then(_raise_or_value)
        key = id(inner)
        with self._lock:
            cut = self.cut_because is not None
            if not cut:
                self._promises[key] = (inner, handle)
                WAITS.promised()
        if cut:
            inner.set_result(self.error())
        else:
            self._follow(handle.inner, lambda outcome: self._keep(key, outcome))
        return outer

    def _follow(self, work: Any, tell: Callable[[Any], None]) -> None:
        try:
            source = work.get_future()
        except RuntimeError:  # gloo has none for point to point
            self._pool().submit(lambda: _tell_after_wait(work, tell))
            return
        source.add_done_callback(lambda future: tell(_outcome(future)))

    def _keep(self, key: int, outcome: Any) -> None:
        with self._lock:
            promised = self._promises.pop(key, None)
        if promised is None:
            return  # cut meanwhile
        WAITS.kept()
        future, handle = promised
        if isinstance(outcome, BaseException):
            self.meter.breaks(outcome)
        handle.over()
        future.set_result(outcome)

    def _pool(self) -> Waiters:
        with self._lock:
            if self._waiters is None:
                self._waiters = Waiters(f"ks-wait-{self.name}", WAITERS)
            return self._waiters

    # ------------------------------------------------------------------ end

    def cut(self, why: str) -> None:
        """End everything now, from any thread, for good."""
        with self._lock:
            if self.cut_because is not None:
                return
            self.cut_because = why
            promises, self._promises = self._promises, {}
            if self.backend is not None:
                _INC_REF(self.backend)  # only `scrap` may run the destructor: it can block for as long as gloo does
        shut_down(self._connections)
        for future, handle in promises.values():
            WAITS.kept()
            handle.over()
            future.set_result(self.error())

    def settle(self, limit_s: float) -> bool:
        """After a cut: wait until nothing can write into anybody's tensors any more.

        Operations that lost their connections end within milliseconds; one that does not within ``limit_s`` waits
        for data that can no longer come, and so writes nothing either.
        """
        end = time.monotonic() + limit_s
        for work in list(self._flying):
            while not work.is_completed():
                if time.monotonic() > end:
                    return False
                time.sleep(0.0005)
        return all(done.wait(max(0.0, end - time.monotonic())) for done in list(self._elsewhere))

    def scrap(self) -> None:
        """Destroy a cut circuit's backend; may block until gloo gives up, so call it on a thread that may."""
        with self._lock:
            backend, self.backend = self.backend, None
            waiters, self._waiters = self._waiters, None
            self._flying.clear()
        if waiters is not None:
            waiters.close()
        if backend is not None:
            _DEC_REF(backend)

    def drop(self) -> None:
        """Let go of a healthy backend in good order."""
        with self._lock:
            self.backend = None
            waiters, self._waiters = self._waiters, None
        if waiters is not None:
            waiters.close()


def discard(circuits: Iterable[Circuit]) -> None:
    """Get rid of communication that was never used, on a thread that may block."""
    for circuit in circuits:
        circuit.cut("never used")
        circuit.scrap()


def _outcome(future: Future[Any]) -> Any:
    try:
        return future.value()
    except Exception as error:
        return error


def _tell_after_wait(work: Any, tell: Callable[[Any], None]) -> None:
    try:
        work.wait()
    except Exception as error:
        tell(error)
    else:
        tell(_results(work))


def _results(work: Any) -> Any:
    try:
        return work.result()
    except RuntimeError:
        return []


def _raise_or_value(future: Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


class CircuitWork(dist.Work):
    """The handle that a collective returns: the backend's own, with an end from outside."""

    def __init__(self, circuit: Circuit, inner: Any, *, sliced: bool, landed: tuple[Track, int]) -> None:
        super().__init__()
        self.inner = inner
        self._landed = landed
        self._circuit = circuit
        self._sliced = sliced
        self._over = False
        self._future: Future[Any] | None = None
        WAITS.launched()
        if sliced:
            circuit.took_off(inner)

    def wait(self, timeout: timedelta | None = None) -> bool:
        circuit = self._circuit
        WAITS.enter()
        try:
            circuit.check()
            if self._sliced:
                circuit.wait(self.inner, timeout)
            else:
                circuit.wait_elsewhere(self.inner, timeout)
        except Exception as error:
            circuit.meter.breaks(error)
            raise
        finally:
            WAITS.leave()
            self.over()
        return True

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = self._circuit.promise(self)
        return self._future

    def over(self) -> None:
        """Count the operation as finished, once."""
        if self._over:
            return
        self._over = True
        # After a cut the backend may still be writing; `settle` waits for that.
        if self._circuit.cut_because is None or self.inner.is_completed():
            self._circuit.landed(self.inner)
        track, number = self._landed
        track.finish(number)
        self._circuit.meter.finish()

    def __del__(self) -> None:
        # Nobody will wait for it any more; do not keep its tensors.
        if not getattr(self, "_over", True):
            self.over()

    def is_completed(self) -> bool:
        return self._circuit.cut_because is not None or bool(self.inner.is_completed())

    def is_success(self) -> bool:
        return self._circuit.cut_because is None and bool(self.inner.is_success())

    def exception(self) -> Any:
        return self._circuit.error() if self._circuit.cut_because is not None else self.inner.exception()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self.inner.result()

    def source_rank(self) -> int:
        return int(self.inner._source_rank())

    _source_rank = source_rank
