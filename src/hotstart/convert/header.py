"""The head of a safetensors file, byte for byte as the reference library writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from hotstart.checkpoint.safetensors import MAX_HEADER
from hotstart.convert.planned import Planned
from hotstart.errors import ModelError

_DTYPES = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ",
    "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
"""As the library orders them: by size, so that from the widest on every tensor is aligned."""


def in_order(tensors: Iterable[Planned]) -> list[Planned]:
    """Tensors as their bytes follow each other: the widest dtype first, then by name."""
    rank = {dtype: place for place, dtype in enumerate(_DTYPES)}
    return sorted(tensors, key=lambda tensor: (-rank[tensor.dtype], tensor.name.encode()))


def header(tensors: Iterable[Planned], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON for tensors that are :func:`in_order`; the data begins at a multiple of 8.

    Raises ModelError where there are more tensors than a header can name.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ModelError(
            f"the header of {len(entries)} tensors has {len(text)} bytes",
            expected=f"at most {MAX_HEADER}",
            advice="Write smaller shards: --shard-size",
        )
    return len(text).to_bytes(8, "little") + text
