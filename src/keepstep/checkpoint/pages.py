"""Pages: makes mapped memory present before it is needed, while everybody else goes on.

A file in memory that has just been made consists of promises: the first store into each of its pages makes the kernel
find and clear one. For a gigabyte that is about a second. ``mmap.madvise`` of the standard library holds the
interpreter for all of it, so a process with tens of gigabytes would neither beat nor answer for as long; here the
system call is made without.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading

POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14. https://man7.org/linux/man-pages/man2/madvise.2.html"""
STRETCH = 16 * 1024 * 1024
"""Bytes per system call: whoever follows behind finds the first ones soon."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(memory: mmap.mmap, start: int = 0) -> None:
    """Make every page from byte ``start`` on present and writable, in order; their contents stay.

    Raises:
        OSError: the kernel has no memory for them.
    """
    size = len(memory)
    held = ctypes.c_char.from_buffer(memory)  # the mapping cannot be closed meanwhile
    base = ctypes.addressof(held)
    for low in range(start // mmap.PAGESIZE * mmap.PAGESIZE, size, STRETCH):
        _touch(memory, base, low, min(low + STRETCH, size))


def populate_beside(memory: mmap.mmap, start: int = 0) -> threading.Thread:
    """The same in a thread, for somebody who fills the memory from the front meanwhile.

    What goes wrong there is left to the one who fills it, who meets the same pages.
    """

    def run() -> None:
        try:
            populate(memory, start)
        except OSError:
            return

    thread = threading.Thread(target=run, name="ks-pages", daemon=True)
    thread.start()
    return thread


def _touch(memory: mmap.mmap, base: int, low: int, high: int) -> None:
    if _libc.madvise(base + low, high - low, POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number != errno.EINVAL:
        raise OSError(number, f"{os.strerror(number)}: bytes {low} to {high} of a mapping")
    for page in range(low, high, mmap.PAGESIZE):  # an older kernel: one store per page does the same
        memory[page] = memory[page]
