"""Streaming: lets trainers write large copies around the processor's caches."""

from __future__ import annotations

from collections.abc import Mapping

STREAM_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
"""https://www.gnu.org/software/libc/manual/html_node/Hardware-Capability-Tunables.html"""
STREAM_FROM_BYTES = 1024 * 1024
"""Copies of this size or more would only push everything else out of a core's own cache."""


def streaming(base: Mapping[str, str]) -> dict[str, str]:
    """Let the C library write large copies around the caches, for a program that is about to be started.

    It does so by itself from a size on that it works out of the cache's; where many cores share one cache that is
    about ours. A virtual machine reports the host's whole cache as each core's own: snapshots then take 1.7 times as
    long. What the user has set stays.
    """
    said = base.get("GLIBC_TUNABLES", "")
    if STREAM_TUNABLE in said:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, (said, f"{STREAM_TUNABLE}={STREAM_FROM_BYTES:#x}")))}
