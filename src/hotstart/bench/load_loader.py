"""What ``bench load`` calls a loader, and what it asks of one.

A loader brings all tensors of a checkpoint into host memory, or into a GPU's, and hands out their bytes
as they lie there. What it needs is imported by its ``prepare``, before the clock starts, and a context on
the GPU is made there; headers are read within the time, for a user waits for them too.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

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
    device: str = "cpu"
    """Where the tensors are to lie, as torch writes it; ``fake``: in memory that behaves like a GPU's."""
    format: str = "safetensors"
    """Of the model's directory: see :mod:`hotstart.bench.load_formats`."""

    @property
    def kind(self) -> str:
        """``cpu``, or ``cuda`` for everything that has memory of its own."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def torch_name(self) -> str:
        """What torch and the libraries are told."""
        return "cpu" if self.device == "fake" else self.device


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
    device_peak: int = 0
    """Bytes of the device's memory at most, beyond those held when the clock started."""
    note: str = ""
    error: str = ""
    resident: float | None = None
    """Share of the files in the page cache just before; None: unknown, or no files."""


class Span(NamedTuple):
    """A tensor's bytes in a device's memory."""

    address: int
    nbytes: int


class Loaded(Struct):
    """Tensors by name. ``keep`` holds what their memory belongs to."""

    tensors: dict[str, memoryview]
    """In memory of this process."""
    keep: Any
    note: str = ""
    spans: dict[str, Span] = {}
    """In a device's memory, where that was asked for."""


Load = Callable[[], Loaded]


_PLAIN_PACKAGES = {"safetensors", "torch"}
"""Modules that a package of the same name brings."""


class Loader(Struct, frozen=True):
    """One row of the table."""

    prepare: Callable[[Task], Load]
    install: str = ""
    """What ``pip install`` must be given; empty: it is always there."""
    imports: tuple[str, ...] = ()
    """Modules that must be found."""
    schemes: tuple[str, ...] = ("file",)
    devices: tuple[str, ...] = ("cpu",)
    """Kinds of device that it loads into."""
    formats: tuple[str, ...] = ("safetensors", "sharded_state")
    """Of a directory. The files of a rank are safetensors, which most libraries read."""
    on_request: str = ""
    """Why it is left out unless it is named; empty: it is not."""

    @property
    def absent(self) -> str:
        """The command that installs it; empty: it is installed."""
        missing = {name for name in self.imports if find_spec(name) is None}
        # Of what only the measurement needs, the library's own command would bring nothing.
        needed = sorted(missing & _PLAIN_PACKAGES)
        if missing - _PLAIN_PACKAGES:
            needed.insert(0, self.install)
        return f"pip install {' '.join(needed)}" if needed else ""


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


def of_torch(tensors: Mapping[str, Any], task: Task, note: str = "") -> Loaded:
    """The bytes of torch's tensors, without a copy unless they are strided; those that the task names."""
    kept = {name: tensors[name].detach().contiguous() for name in task.names if name in tensors}
    spans = {name: Span(t.data_ptr(), t.numel() * t.element_size()) for name, t in kept.items()}
    if task.device == "cpu":
        return Loaded({name: memory(span) for name, span in spans.items()}, kept, note)
    return Loaded({}, kept, note, spans)


def memory(span: Span) -> memoryview:
    """Bytes that lie in memory of this process."""
    if not span.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * span.nbytes).from_address(span.address)).cast("B")
