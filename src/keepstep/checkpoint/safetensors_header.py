"""The head of a safetensors file, by the format's specification: https://huggingface.co/docs/safetensors

Eight bytes with the length of a JSON text, the text itself (padded with blanks so that the data begins at a multiple of
eight), then the tensors without gaps. Writing it here lets a payload stream from mapped memory.
"""

from __future__ import annotations

import struct

import msgspec

from keepstep.checkpoint.generation import Part
from keepstep.checkpoint.slot import TensorEntry

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Torch's names and the format's. Anything else is stored as bytes; the part's record keeps what it really is."""
RESERVED = "__metadata__"
_LENGTH = struct.Struct("<Q")


def header(part: Part) -> bytes:
    """The head of the payload's file of a part."""
    fields: dict[str, object] = {RESERVED: _metadata(part)}
    for entry in part.tensors:
        dtype = DTYPES.get(entry.dtype)
        shape = list(entry.shape) if dtype else [entry.nbytes]
        end = entry.offset + entry.nbytes
        fields[_name(entry)] = {"dtype": dtype or "U8", "shape": shape, "data_offsets": [entry.offset, end]}
    body = msgspec.json.encode(fields)
    body += b" " * (-len(body) % 8)
    return _LENGTH.pack(len(body)) + body


def _name(entry: TensorEntry) -> str:
    return f"tensor.{entry.name}" if entry.name == RESERVED else entry.name


def _metadata(part: Part) -> dict[str, str]:
    """Strings only, as the format wants it."""
    found = {
        "format": "pt",
        "keepstep": str(part.format),
        "job": part.job,
        "step": str(part.version.step),
        "epoch": str(part.version.epoch),
        "rank": str(part.rank),
        "world_size": str(part.world_size),
    }
    pieces = {
        entry.name: [list(entry.global_shape), list(entry.corner)] for entry in part.tensors if entry.global_shape
    }
    if pieces:
        found["global_shapes"] = msgspec.json.encode(pieces).decode()
    strange = {entry.name: [entry.dtype, list(entry.shape)] for entry in part.tensors if entry.dtype not in DTYPES}
    if strange:
        found["stored_as_bytes"] = msgspec.json.encode(strange).decode()
    return found
