"""What a generation costs when only what changed is written: differences, or gradients to replay, against the state.

    python -m benchmarks.delta --json

Trains the example's language model (a GPT over the bytes of Python's standard library) with AdamW, warms up, and then
looks at consecutive steps at learning rates of today's runs: bytes of the full state, of the lossless difference to
the step before (by kind of tensor) and to one further back, of the state packed without a base, and of a record from
which the step can be replayed. Then it restores: the last
state from the first one and the chain of differences, and from the first one and the gradients, both compared with
the live one bit for bit.

In float32 everything is float32. In bfloat16 weights and both moments are bfloat16, as torch's AdamW keeps them. Mixed
is what most large runs do: the model computes in bfloat16, and AdamW has float32 moments and a float32 master copy of
the weights, which the bfloat16 ones are rounded from after each step. A checkpoint then has both; ``without_master`` is
the same with the bfloat16 weights and the moments only.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "lm"))

from train import Bytes, batch, corpus

from keepstep.checkpoint import delta
from keepstep.checkpoint.slot import TensorEntry, Version
from keepstep.checkpoint.tiers.memory import MemoryTier
from keepstep.trainer.gradient_log_torch import GradientLog, rebuild
from keepstep.trainer.replay_torch import differing, state_sums

LANES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "mixed": torch.bfloat16}
"""By name: the dtype that the model computes in."""
RATES = (1e-4, 1e-5)
WARM_RATE = 1e-3
LEAST_STEPS = 10
"""A chain that is shorter proves less."""
KINDS = ("weights", "exp_avg", "exp_avg_sq", "step")
MASTER = "master"
"""The kind that only mixed precision has."""


class Training:
    """Model, optimizer and one step.

    Attributes:
        masters: float32 copies of the weights, which the optimizer steps; the weights themselves where there are none.
    """

    def __init__(self, args: argparse.Namespace, lane: str, text: Tensor) -> None:
        torch.manual_seed(args.seed)
        self.args, self.text, self.mixed = args, text, lane == "mixed"
        self.model = Bytes(width=args.width, layers=args.layers, dropout=0.0)
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()] if self.mixed else []
        self.model.to(LANES[lane])
        self.kinds = (*KINDS, MASTER) if self.mixed else KINDS
        how: dict[str, Any] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}[args.how]
        self.optimizer = torch.optim.AdamW(
            self.masters or self.model.parameters(), lr=WARM_RATE, betas=(0.9, 0.95), weight_decay=0.1, **how
        )
        self.index = 0

    def step(self) -> float:
        inputs, targets = batch(
            self.text, seed=self.args.seed, step=self.index, rank=0, size=self.args.batch, context=64
        )
        loss = F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.flatten())
        self.model.zero_grad()
        loss.backward()
        for weight, master in zip(self.model.parameters(), self.masters, strict=False):
            master.grad = None if weight.grad is None else weight.grad.float()
        nn.utils.clip_grad_norm_(self.masters or self.model.parameters(), 1.0)
        self.optimizer.step()
        self.round()
        self.index += 1
        return loss.item()

    @torch.no_grad()
    def round(self) -> None:
        """Where there are masters, the weights follow from them."""
        for weight, master in zip(self.model.parameters(), self.masters, strict=False):
            weight.copy_(master)

    def tensors(self, kind: str) -> list[Tensor]:
        if kind == "weights":
            return list(self.model.parameters())
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        return held if kind == MASTER else [self.optimizer.state[p][kind] for p in held]

    def payload(self, kind: str) -> tuple[bytes, list[TensorEntry]]:
        """Tensors one behind the other, as a part of a generation holds them."""
        body, entries = bytearray(), []
        for number, tensor in enumerate(self.tensors(kind)):
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(TensorEntry(f"{kind}/{number}", dtype, tuple(tensor.shape), len(body), len(raw)))
            body += raw
        return bytes(body), entries


class Chain:
    """Differences from step to step, encoded, and decoded in place onto the first state."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.last = {kind: training.payload(kind)[0] for kind in training.kinds}
        self.memory = {kind: bytearray(body) for kind, body in self.last.items()}
        self.full = sum(map(len, self.last.values()))
        self.sizes: dict[str, list[int]] = {kind: [] for kind in training.kinds}
        self.encode_s = self.decode_s = self.encode_cpu_s = self.decode_cpu_s = 0.0
        self.exact = True

    def step(self) -> None:
        for kind in self.training.kinds:
            new, entries = self.training.payload(kind)
            began, cpu = time.perf_counter(), time.process_time()
            pairs = list(delta.encode(memoryview(new), memoryview(self.last[kind]), entries))
            file = b"".join(stored for _, stored in pairs)
            self.encode_s += time.perf_counter() - began
            self.encode_cpu_s += time.process_time() - cpu
            view = memoryview(self.memory[kind])
            began, cpu = time.perf_counter(), time.process_time()
            delta.decode([frame for frame, _ in pairs], memoryview(file), view, view)
            self.decode_s += time.perf_counter() - began
            self.decode_cpu_s += time.process_time() - cpu
            self.exact = self.exact and self.memory[kind] == new
            self.sizes[kind].append(len(file))
            self.last[kind] = new

    def totals(self) -> list[int]:
        return [sum(step) for step in zip(*self.sizes.values(), strict=True)]


def measure(warm: Training, rate: float, steps: int, far: int) -> dict[str, Any]:
    """Differences and gradients of ``steps`` consecutive steps from one warmed-up training."""
    training = copy.deepcopy(warm)
    for group in training.optimizer.param_groups:
        group["lr"] = rate
    training.step()  # the moments have seen this rate's first step
    base = copy.deepcopy(training)
    chain, tier, named = Chain(training), MemoryTier(), {"optimizer": training.optimizer}
    log = GradientLog(named, tier)
    check = log.start(Version(0, 1))
    first, train_s = dict(chain.last), 0.0
    for number in range(1, steps + 1):
        began = time.perf_counter()
        training.step()
        log.commit(Version(number, 1))
        train_s += time.perf_counter() - began
        chain.step()
    log.close()
    exact = False
    cpu = time.process_time()
    if check.exact and not log.broken:
        rebuild(tier, {"optimizer": base.optimizer}, Version(0, 1), upto=Version(steps, 1))
        base.round()
        exact = not differing(state_sums({"optimizer": base.optimizer}), state_sums(named)) and all(
            base.payload(kind)[0] == training.payload(kind)[0] for kind in training.kinds
        )
    cpu = time.process_time() - cpu
    found = report(chain, log, exact, check.reason, cpu / steps, train_s / steps)
    found["packed_ratio"] = round(stored(training, None) / chain.full, 4)
    found["delta_ratio_by_distance"] = {1: found["delta_ratio"], steps: round(stored(training, first) / chain.full, 4)}
    for _ in range(steps, far):
        training.step()
    if far > steps:
        found["delta_ratio_by_distance"][far] = round(stored(training, first) / chain.full, 4)
    return found


def stored(training: Training, base: dict[str, bytes] | None) -> int:
    """Bytes of the state as a difference to a base, or packed without one."""
    total = 0
    for kind in training.kinds:
        new, entries = training.payload(kind)
        held = None if base is None else memoryview(base[kind])
        total += sum(frame.stored for frame, _ in delta.encode(memoryview(new), held, entries))
    return total


def report(
    chain: Chain, log: GradientLog, exact: bool, reason: str, replay_cpu_s: float, step_s: float
) -> dict[str, Any]:
    totals, full = chain.totals(), chain.full
    ratios = [total / full for total in totals]
    per_kind = {kind: round(statistics.median(sizes)) for kind, sizes in chain.sizes.items()}
    sizes = {kind: len(body) for kind, body in chain.last.items()}
    replay = round(log.stored / log.steps) if log.steps else 0
    found = {
        "full_bytes": full,
        "delta_bytes": round(statistics.median(totals)),
        "delta_ratio": round(statistics.median(ratios), 4),
        "delta_ratio_min": round(min(ratios), 4),
        "delta_ratio_max": round(max(ratios), 4),
        "full_bytes_by_kind": sizes,
        "delta_bytes_by_kind": per_kind,
        "delta_ratio_by_kind": {kind: round(per_kind[kind] / size, 4) for kind, size in sizes.items()},
        "replay_bytes": replay,
        "replay_ratio": round(replay / full, 4),
        "exact_delta": chain.exact,
        "exact_replay": exact,
        "replay_check": reason,
        "chain": len(totals),
        "encode_mb_s": round(full * len(totals) / chain.encode_s / 1e6, 1),
        "decode_mb_s": round(full * len(totals) / chain.decode_s / 1e6, 1),
        "encode_mb_per_cpu_s": round(full * len(totals) / max(chain.encode_cpu_s, 1e-9) / 1e6, 1),
        "decode_mb_per_cpu_s": round(full * len(totals) / max(chain.decode_cpu_s, 1e-9) / 1e6, 1),
        "delta_encode_s_per_step": round(chain.encode_s / len(totals), 4),
        "replay_stall_s_per_step": round(log.stall_s / max(1, log.steps), 4),
        "replay_rebuild_cpu_s_per_step": round(replay_cpu_s, 4),
        "step_s": round(step_s, 4),
    }
    if MASTER in sizes:
        full, size = (sum(each[kind] for kind in KINDS) for each in (sizes, per_kind))
        found["without_master"] = {"full_bytes": full, "delta_bytes": size, "delta_ratio": round(size / full, 4)}
    return found


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--steps", type=int, default=12, help=f"measured steps, at least {LEAST_STEPS}")
    ask.add_argument("--far", type=int, default=30, help="also the difference over so many steps; 0 leaves it out")
    ask.add_argument("--warm-up", type=int, default=40, help="steps before")
    ask.add_argument("--width", type=int, default=256)
    ask.add_argument("--layers", type=int, default=4)
    ask.add_argument("--batch", type=int, default=8)
    ask.add_argument("--dtype", choices=[*LANES], action="append", help="one or more; all where left out")
    ask.add_argument("--how", choices=["default", "foreach", "fused"], default="default", help="AdamW's implementation")
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    steps = max(args.steps, LEAST_STEPS)

    text = corpus()
    found: dict[str, Any] = {"benchmark": "delta", "optimizer": "AdamW", "implementation": args.how}
    found |= {"steps": steps, "width": args.width, "layers": args.layers, "seed": args.seed}
    for name in args.dtype or LANES:
        warm = Training(args, name, text)
        for _ in range(args.warm_up):
            loss = warm.step()
        found["parameters"] = sum(p.numel() for p in warm.model.parameters())
        by_rate = {f"{rate:g}": measure(warm, rate, steps, args.far) for rate in RATES}
        for rate, row in by_rate.items():
            print(
                f"{name} lr {rate}: loss {loss:.2f}, full {row['full_bytes'] / 1e6:.1f} MB, difference "
                f"{row['delta_ratio']:.1%}, gradient {row['replay_ratio']:.1%}, exact {row['exact_delta']} and "
                f"{row['exact_replay']}",
                file=sys.stderr,
            )
        whole = dict(next(iter(by_rate.values())))
        whole["exact_delta"] = all(row["exact_delta"] for row in by_rate.values())
        whole["exact_replay"] = all(row["exact_replay"] for row in by_rate.values())
        moments = "float32" if warm.mixed else name
        found[name] = {"moments": moments, "lr": RATES[0], **whole, "by_lr": by_rate}
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))
    exact = all(found[name]["exact_delta"] and found[name]["exact_replay"] for name in args.dtype or LANES)
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
