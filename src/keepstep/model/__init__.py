"""Words: the values that every other part of keepstep speaks in.

Frozen msgspec structs and pure functions over them. Nothing here reads a clock, opens a file or starts a thread.
"""
