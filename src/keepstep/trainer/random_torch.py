"""Random states of this process: they are training state like any other, and roll back with it."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Of Python, torch, the current CUDA device, and NumPy where somebody uses it."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        states["numpy"] = numpy.random.get_state()
    return states


def put_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


def derive_states(states: dict[str, Any], rank: int) -> dict[str, Any]:
    """States for a rank that did not exist when ``states`` were kept: others than any rank's, the same whenever asked.

    Args:
        states: of the nearest rank that did.
    """
    digest = hashlib.blake2b(
        bytes(states["torch"].tolist()), digest_size=8, key=b"keepstep", salt=struct.pack("<q", rank)
    )
    seed = int.from_bytes(digest.digest(), "little") >> 1
    derived: dict[str, Any] = {
        "python": random.Random(seed).getstate(),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if "cuda" in states:  # Philox: seed and offset
        derived["cuda"] = torch.frombuffer(bytearray(struct.pack("<qq", seed, 0)), dtype=torch.uint8)
    if "numpy" in states:
        import numpy

        derived["numpy"] = numpy.random.RandomState(seed % 2**32).get_state()
    return derived
