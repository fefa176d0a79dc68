"""What ``bench load`` calls a loader, and what it asks of one.

A loader brings all tensors of a checkpoint into host memory and hands out their bytes as they lie
there. What it needs is imported by its ``prepare``, before the clock starts; headers are read within
the time, for a user waits for them too.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from hotstart.checkpoint.safetensors import parse_header


class Task(Struct, frozen=True):
    """What one child process is to do."""

    loader: str
    location: str
    """A directory, or an address of an object store."""
    files: list[tuple[str, int]]
    """Path or address of each weight file, and its bytes."""
    names: list[str]
    """Of the tensors. A model may hold more: a head that is tied to the embedding has two names."""
    paths: list[str] = []
    """Files of this machine that the loader reads."""
    evict: bool = False
    """Drop them from the page cache when the imports are done, which may take long enough to warm it."""
    small_files: str = ""
    """The directory with the small files of an address."""
    converted: str = ""
    """A file in the loader's own format."""


class Measurement(Struct, frozen=True):
    """What one child process did."""

    seconds: float = 0.0
    digest: str = ""
    """Of the checksums of all tensors."""
    bytes: int = 0
    peak: int = 0
    """Resident bytes at most, interpreter and libraries included."""
    before: int = 0
    """Resident bytes when the clock started."""
    anonymous: int = 0
    """Resident bytes at the end that no file on disk stands behind: these cannot be reclaimed."""
    note: str = ""
    error: str = ""
    resident: float | None = None
    """Share of the files in the page cache just before; None: unknown, or no files."""


class Loaded(Struct):
    """Tensors by name. ``keep`` holds what their memory belongs to."""

    tensors: dict[str, memoryview]
    keep: Any
    note: str = ""


Load = Callable[[], Loaded]


class Loader(Struct, frozen=True):
    """One row of the table."""

    prepare: Callable[[Task], Load]
    install: str = ""
    """What ``pip install`` must be given; empty: it is always there."""
    imports: tuple[str, ...] = ()
    """Modules that must be found."""
    schemes: tuple[str, ...] = ("file",)
    on_request: str = ""
    """Why it is left out unless it is named; empty: it is not."""

    @property
    def absent(self) -> str:
        """The command that installs it; empty: it is installed."""
        missing = any(find_spec(name) is None for name in self.imports)
        return f"pip install {self.install}" if missing else ""


def digest(sums: Mapping[str, int], names: Iterable[str]) -> str:
    """Of the sums of these tensors. Raises KeyError for one that was not loaded."""
    hashed = hashlib.sha256()
    for name in names:
        hashed.update(f"{name}\0{sums[name]}\n".encode())
    return hashed.hexdigest()[:16]


def of_images(files: list[tuple[str, int]], images: list[memoryview]) -> dict[str, memoryview]:
    """The tensors of files that lie in memory as they are on disk."""
    tensors: dict[str, memoryview] = {}
    for (path, size), image in zip(files, images, strict=True):
        length = int.from_bytes(image[:8], "little")
        for ref in parse_header(path, size, bytes(image[8 : 8 + length])).tensors:
            tensors[ref.name] = image[ref.offset : ref.offset + ref.nbytes]
    return tensors


def of_torch(tensors: Mapping[str, Any]) -> Loaded:
    """The bytes of torch's tensors, without a copy unless they are strided."""
    kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    return Loaded(
        {name: _memory(t.data_ptr(), t.numel() * t.element_size()) for name, t in kept.items()}, kept
    )


def _memory(address: int, nbytes: int) -> memoryview:
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
