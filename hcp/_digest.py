"""Hashes of values, by which ranks compare what they hold."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def bytes_of(tensor: Tensor) -> bytes:
    """The elements' bytes, end to end, for any dtype."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""


def digest_of(value: object) -> bytes:
    """Hash tensors, arrays, bytes, numbers and text, and lists, dictionaries and dataclasses of
    them. Different values have different hashes."""
    digest = hashlib.sha256()
    for kind, data in _parts_of(value):
        digest.update(f"{kind} {len(data)} ".encode())
        digest.update(data)
    return digest.digest()


def _parts_of(value: Any) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}", bytes_of(value)
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}", b""
        for key in sorted(value, key=str):
            yield "key", str(key).encode()
            yield from _parts_of(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"list of {len(value)}", b""
        for item in value:
            yield from _parts_of(item)
    elif isinstance(value, bytes):
        yield "bytes", value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        yield from _parts_of({field.name: getattr(value, field.name) for field in fields})
    elif hasattr(value, "tobytes"):
        form = [getattr(value, name, None) for name in ("dtype", "shape", "mode", "size")]
        yield f"array {form}", value.tobytes()
    else:
        yield "other", repr(value).encode()
