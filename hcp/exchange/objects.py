"""Objects that ranks tell each other. torch.distributed's own collectives of objects want numpy,
which torch does not require."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_object(own: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's object, by rank of the group (None: the default one). All its ranks call it."""
    payload = pickle.dumps(own)
    device = dist.distributed_c10d._get_object_coll_device(group)
    lengths = [int(x) for x in _all_gather(torch.tensor([len(payload)], device=device), group)]
    block = torch.frombuffer(bytearray(payload.ljust(max(lengths))), dtype=torch.uint8)
    blocks = _all_gather(block.to(device), group)
    return [
        pickle.loads(bytes_of(block)[:length])
        for block, length in zip(blocks, lengths, strict=True)
    ]


def _all_gather(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return parts


def bytes_of(tensor: Tensor) -> bytes:
    """What the elements hold, end to end, whatever their dtype."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""


def digest_of(value: object) -> bytes:
    """A hash of tensors, arrays, bytes, numbers and text, and of lists, dictionaries and
    dataclasses of them: other values have another one."""
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
