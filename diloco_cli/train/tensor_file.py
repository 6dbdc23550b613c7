"""Writing a safetensors file tensor by tensor: the whole is never in memory, not even as a copy of what is there.

    8 bytes       length of the header, little-endian
    header        JSON: name -> dtype, shape, [begin, end) behind the header; spaces up to a multiple of 8
    data          the tensors' bytes, largest elements first, so that each is aligned

Why not the package's own writer: it wants all tensors at once, and makes a second copy of them.
Owns: this layout. Called by: train.export.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors`, of types in DTYPES, to a new file. Each is asked for twice and not kept in between."""
    order, header = _plan(tensors)
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            values = tensors[name].detach().cpu().contiguous().view(-1)
            if values.numel():
                data: Any = values.view(torch.uint8).numpy()
                file.write(data)


def _plan(tensors: Mapping[str, Tensor]) -> tuple[list[str], dict[str, Any]]:
    """The order of the data, and the header's entries."""
    kinds = {}
    for name in tensors:
        tensor = tensors[name]
        kinds[name] = (tensor.element_size(), DTYPES[tensor.dtype], list(tensor.shape), tensor.numel())
    order = sorted(kinds, key=lambda name: (-kinds[name][0], name))
    header: dict[str, Any] = {}
    at = 0
    for name in order:
        size, dtype, shape, numel = kinds[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size * numel]}
        at += size * numel
    return order, header
