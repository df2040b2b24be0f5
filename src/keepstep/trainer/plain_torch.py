"""Plain state: dictionaries, numbers, strings, bytes and small tensors as msgpack. Never pickle.

What a peer sends can then be read without trusting it, and what cannot be kept is refused by name when the run
starts, not when it has to be restored.
"""

from __future__ import annotations

import contextlib
import math
import struct
import sys
from collections import Counter, OrderedDict, deque
from typing import Any

import msgspec
import torch
from msgspec.msgpack import Ext

from keepstep.trainer.exceptions import StateNotPlain

_TUPLE, _TENSOR, _ARRAY, _BIG, _SET, _COUNTER, _ORDERED, _COMPLEX, _SCALAR, _WORDS, _DTYPE, _PAIRS, _DEQUE = range(
    1, 14
)
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1
_WORDS_FROM = 32
"""Tuples of at least this many 32-bit integers are packed tightly: Python's random state is 625 of them."""
_KINDS = "biufcSUmM"
"""Of NumPy: numbers, text and times. Never objects, which would need pickle."""
MAX_DEPTH = 32

_encode = msgspec.msgpack.Encoder().encode


def encode_plain(value: Any, name: str) -> bytes:
    """Raises ``StateNotPlain`` naming the path of what cannot be kept."""
    return _encode(_lower(value, name, 0))


def decode_plain(data: bytes) -> Any:
    return _decoder.decode(data)


def _lower(value: Any, path: str, depth: int) -> Any:
    kind = type(value)
    if kind is int:
        if _SMALLEST <= value <= _LARGEST:
            return value
        return Ext(_BIG, str(value).encode())
    if value is None or kind in (bool, float, str, bytes):
        return value
    if depth > MAX_DEPTH:
        raise StateNotPlain(f"{path}: nested deeper than {MAX_DEPTH} levels; does it contain itself?")
    if isinstance(value, torch.Tensor):
        return _lower_tensor(value, path)
    if isinstance(value, Counter):
        return Ext(_COUNTER, _encode(_lower_dict(value, path, depth)))
    if isinstance(value, OrderedDict):
        return Ext(_ORDERED, _encode(_lower_dict(value, path, depth)))
    if isinstance(value, dict):
        return _lower_dict(value, path, depth) if _simple(value) else _lower_pairs(value, path, depth)
    if kind is list:
        return [_lower(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return _lower_tuple(value, path, depth)
    if kind in (set, frozenset):
        items = [_lower(item, f"{path}{{}}", depth + 1) for item in sorted(value, key=repr)]
        return Ext(_SET, _encode([kind is frozenset, items]))
    if kind is deque:
        return Ext(_DEQUE, _encode([value.maxlen, [_lower(item, f"{path}[]", depth + 1) for item in value]]))
    if kind is complex:
        return Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag))
    if kind is bytearray:
        return bytes(value)
    if kind is torch.dtype:
        return Ext(_DTYPE, str(value).removeprefix("torch.").encode())
    if (lowered := _lower_numpy(value)) is not None:
        return lowered
    if isinstance(value, int):  # enumerations and other subclasses: their plain value counts
        return _lower(int(value), path, depth)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise StateNotPlain(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept without pickle. Leave it out of "
        f"state_dict() (load_state_dict() can rebuild it), or turn it into numbers, strings, lists, dicts or tensors"
    )


def _simple(value: dict[Any, Any]) -> bool:
    return not any(isinstance(key, (bytes, tuple)) for key in value)


def _lower_pairs(value: dict[Any, Any], path: str, depth: int) -> Ext:
    """A dictionary with keys that msgpack has no place for: where readers of several shards keep their places, say."""
    pairs = []
    for key, item in value.items():
        if not isinstance(key, (str, int, float, bool, type(None), bytes, tuple)):
            raise StateNotPlain(f"{path} has a key of type {type(key).__name__}; use strings or numbers")
        pairs.append([_lower(key, f"key of {path}", depth + 1), _lower(item, f"{path}.{key!r}", depth + 1)])
    return Ext(_PAIRS, _encode(pairs))


def _lower_dict(value: dict[Any, Any], path: str, depth: int) -> dict[Any, Any]:
    lowered = {}
    for key, item in value.items():
        if not isinstance(key, (str, int, float, bool, type(None))):
            raise StateNotPlain(f"{path} has a key of type {type(key).__name__}; use strings or numbers")
        lowered[key] = _lower(item, f"{path}.{key}", depth + 1)
    return lowered


def _lower_tuple(value: tuple[Any, ...], path: str, depth: int) -> Ext:
    if len(value) >= _WORDS_FROM and set(map(type, value)) == {int}:
        with contextlib.suppress(struct.error):  # some item is no 32-bit word
            return Ext(_WORDS, struct.pack(f"<{len(value)}I", *value))
    return Ext(_TUPLE, _encode([_lower(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]))


def _lower_tensor(value: torch.Tensor, path: str) -> Ext:
    local = getattr(value, "_local_tensor", value)
    if local.layout is not torch.strided:
        raise StateNotPlain(f"{path} is a sparse tensor; only dense tensors can be kept")
    dense = local.detach().to("cpu").contiguous()
    raw = bytes(dense.reshape(-1).view(torch.uint8).numpy()) if _has_numpy() else _bytes_of(dense)
    return Ext(_TENSOR, _encode([str(dense.dtype).removeprefix("torch."), list(dense.shape), raw]))


def _has_numpy() -> bool:
    return "numpy" in sys.modules


def _bytes_of(dense: torch.Tensor) -> bytes:
    buffer = bytearray(dense.numel() * dense.element_size())
    if buffer:
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(dense.reshape(-1).view(torch.uint8))
    return bytes(buffer)


def _lower_numpy(value: Any) -> Ext | None:
    """NumPy is not a dependency: if nobody has imported it, nothing can be of it."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray) and value.dtype.kind in _KINDS:
        return Ext(_ARRAY, _encode([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, numpy.generic) and value.dtype.kind in _KINDS:
        return Ext(_SCALAR, _encode([value.dtype.str, value.tobytes()]))
    return None


def _raise_up(code: int, data: memoryview) -> Any:
    raw = bytes(data)
    if code == _WORDS:
        return struct.unpack(f"<{len(raw) // 4}I", raw)
    if code == _BIG:
        return int(raw)
    if code == _COMPLEX:
        return complex(*struct.unpack("<dd", raw))
    if code == _DTYPE:
        return _dtype(raw.decode())
    inner = _decoder.decode(raw)
    if code == _TUPLE:
        return tuple(inner)
    if code == _TENSOR:
        dtype, shape, content = inner
        return _tensor(_dtype(dtype), shape, content)
    if code == _SET:
        return frozenset(inner[1]) if inner[0] else set(inner[1])
    if code == _COUNTER:
        return Counter(inner)
    if code == _ORDERED:
        return OrderedDict(inner)
    if code == _PAIRS:
        return dict(map(tuple, inner))
    if code == _DEQUE:
        return deque(inner[1], inner[0])
    if code in (_ARRAY, _SCALAR):
        import numpy

        if code == _SCALAR:
            return numpy.frombuffer(inner[1], dtype=inner[0])[0]
        return numpy.frombuffer(inner[2], dtype=inner[0]).reshape(inner[1]).copy()
    raise StateNotPlain(f"snapshot holds a value of unknown kind {code}; was it written by a newer version?")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise StateNotPlain(f"snapshot holds a tensor of dtype {name}, which this torch does not know")
    return found


def _tensor(dtype: torch.dtype, shape: list[int], content: bytes) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    if made.numel() * made.element_size() != len(content):
        raise StateNotPlain(f"snapshot holds a tensor of shape {shape} with {len(content)} bytes")
    if math.prod(shape):
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)
        made.copy_(flat)
    return made


_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Any, ext_hook=_raise_up)
