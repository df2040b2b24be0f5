"""Streaming: trainers get the C library's setting, and keep the user's."""

from __future__ import annotations

import subprocess
import sys

from keepstep.agent.streaming import STREAM_TUNABLE, streaming


def test_the_users_own_settings_stay() -> None:
    """Other tunables are kept beside ours; the same one, set by the user, wins."""
    assert streaming({}) == {"GLIBC_TUNABLES": f"{STREAM_TUNABLE}=0x100000"}
    assert streaming({"GLIBC_TUNABLES": "glibc.malloc.check=1"}) == {
        "GLIBC_TUNABLES": f"glibc.malloc.check=1:{STREAM_TUNABLE}=0x100000"
    }
    assert streaming({"GLIBC_TUNABLES": f"{STREAM_TUNABLE}=0x4040"}) == {}


def test_a_program_starts_with_it_and_says_nothing() -> None:
    """Whatever the machine's C library, the setting does no harm."""
    done = subprocess.run([sys.executable, "-c", "print(1)"], env=streaming({}), capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"1\n", b"")
