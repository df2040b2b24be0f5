"""Self-test of a node: products whose results are known, on each core and accelerator, and memory patterns.

    python -m keepstep.probes.selftest --seconds 60 --share 0.1

Runs at the lowest priority and takes its share of the processors, so that it can run beside training. One JSON object
on stdout. A test that fails names the core or the device. One that passes says that nothing was wrong in so much work;
many a broken machine passes for hours (FP units fail with certain inputs, heat or voltage only).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from keepstep.probes import memory
from keepstep.probes.gemm import CASES

TESTS = ("gemm", "memory", "all")
MEMORY_MIB = 64
FAILURES_KEPT = 16


class Report(Struct, frozen=True, kw_only=True):
    """What a self-test came to.

    Attributes:
        passed: ``None`` where it could not be made; ``why`` says why.
        digest: of the first round's results; equal seeds give equal digests on machines that multiply right.
        rounds: how often all cases were done on all devices.
        flop: floating point operations that were checked.
    """

    test: str
    seed: int
    passed: bool | None
    why: str = ""
    digest: str = ""
    rounds: int = 0
    seconds: float = 0.0
    flop: int = 0
    devices: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def run(test: str = "all", *, seed: int, seconds: float, share: float = 1.0, mib: int = MEMORY_MIB) -> Report:
    """Examine this machine for so long, with one round at least.

    Args:
        seconds: budget; a round that has begun is finished.
        share: of this machine's processors, between 0 and 1. One core is used at a time.
    """
    if test not in TESTS:
        return Report(test=test, seed=seed, passed=None, why=f"no such test; there are {', '.join(TESTS)}")
    began = time.monotonic()
    pause = Pause(share * (os.cpu_count() or 1))
    failed: list[str] = []
    if test in ("memory", "all"):
        failed += memory.examine(mib, seed, pause=pause)
    if test == "memory":
        return Report(
            test=test, seed=seed, passed=not failed, rounds=1, seconds=round(time.monotonic() - began, 3),
            failed=tuple(failed),
        )  # fmt: skip
    try:
        from keepstep.probes.gemm_torch import Product, devices, multiply, one_thread
    except ImportError as error:
        passed = False if failed else None  # memory that failed has failed without torch, too
        return Report(test=test, seed=seed, passed=passed, why=f"torch is not there: {error}", failed=tuple(failed))
    one_thread()
    products = [Product(case, seed + number) for number, case in enumerate(CASES)]
    there, times = devices(), multiply()
    sums = hashlib.blake2b(digest_size=8)
    rounds = flop = 0
    while rounds == 0 or (time.monotonic() - began < seconds and len(failed) < FAILURES_KEPT):
        for device in there:
            with pinned(device.core):
                for product in products:
                    try:
                        wrong, digest = product.run(device, times)
                    except RuntimeError as error:
                        if product.case.shared:
                            failed.append(f"gemm {product.case.kind} on {device.name}: {str(error).splitlines()[0]}")
                        continue
                    flop += product.case.flop
                    if wrong is not None:
                        failed.append(wrong.words(device.name))
                    if rounds == 0 and device is there[0] and product.case.shared:
                        sums.update(digest.encode())
                    pause()
        rounds += 1
    return Report(
        test=test,
        seed=seed,
        passed=not failed,
        digest=sums.hexdigest(),
        rounds=rounds,
        seconds=round(time.monotonic() - began, 3),
        flop=flop,
        devices=tuple(device.name for device in there),
        failed=tuple(dict.fromkeys(failed))[:FAILURES_KEPT],
    )


class Pause:
    """Sleeps as long as it takes to have worked for a share of the time only.

    Args:
        duty: share of one core; 1 and more never sleeps.
    """

    def __init__(self, duty: float, *, clock: Callable[[], float] = time.monotonic,
                 sleep: Callable[[float], None] = time.sleep) -> None:  # fmt: skip
        self._rest = max(0.0, 1 / max(duty, 0.001) - 1)
        self._clock, self._sleep = clock, sleep
        self._since = clock()

    def __call__(self) -> None:
        if self._rest > 0:
            self._sleep((self._clock() - self._since) * self._rest)
        self._since = self._clock()


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Run on this core alone, so that a wrong result names it."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except OSError:  # taken away from us meanwhile
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end_with_input() -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    os._exit(1)


def main(argv: list[str] | None = None) -> int:
    ask = argparse.ArgumentParser(prog="keepstep-selftest", description="Examine this machine.")
    ask.add_argument("--test", default="all")
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--seconds", type=float, default=10.0)
    ask.add_argument("--share", type=float, default=1.0)
    ask.add_argument("--until-eof", action="store_true", help="end when standard input does: whoever asked is gone")
    args = ask.parse_args(argv)
    if args.until_eof:
        threading.Thread(target=_end_with_input, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(19)
    report = run(args.test, seed=args.seed, seconds=args.seconds, share=args.share)
    print(msgspec.json.encode(report).decode(), flush=True)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
