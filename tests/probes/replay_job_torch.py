"""A tiny replay job: a few data-parallel steps over gloo, and a checksum of the weights at their end.

``FAULT`` is known to one machine only: ``flip`` changes one bit of its gradient in one step.
"""

from __future__ import annotations

import hashlib
import os
import struct

import torch
import torch.distributed as dist

STEPS = 3


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    weights = torch.zeros(8, 8)
    for step in range(STEPS):
        gradient = torch.full_like(weights, float(step + 1))
        if step == 1 and os.environ.get("FAULT") == "flip":
            gradient[3, 3] = flipped(float(gradient[3, 3]))
        dist.all_reduce(gradient)
        weights -= gradient / dist.get_world_size()
    print(f"checksum: {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


def flipped(value: float) -> float:
    bits = struct.unpack("<I", struct.pack("<f", value))[0] ^ (1 << 20)
    changed: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return changed


if __name__ == "__main__":
    main()
