"""The seam for loaders of other libraries: what one is given, and what it must do. Torch-free.

To add an adapter:

1. Write ``hotstart/loading/streams/NAME.py`` with two functions. ``plan(request: Request) -> Described`` says
   what the library will be told, and imports nothing. ``open_stream(request: Request) -> TensorStream``
   imports the library, inside the function, never at the top; torch is there by then.
2. In its row of :mod:`hotstart.config.load_formats` set ``library``, ``distribution``, ``extra`` and
   ``module="NAME"``, list the keys that it takes and the places that it cannot read, and remove
   ``because`` and ``instead``. Add the extra to ``pyproject.toml``.
3. Run ``tests/loading/test_every_loader.py``, which takes every row of the table.

Headers have been validated and matched before a stream is opened, names and shapes are checked again
when its tensors are put into the store, and what it raises becomes an error that names the library:
an adapter needs to do none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from hotstart.config.load_formats import FORMATS
from hotstart.errors import ConfigError
from hotstart.units import format_size

if TYPE_CHECKING:
    from torch import Tensor

    from hotstart.checkpoint.base import Checkpoint
    from hotstart.config.settings import LoadConfig
    from hotstart.loading.match import Matched
    from hotstart.storage.cloud_settings import CloudSettings
    from hotstart.storage.location import Location
    from hotstart.storage.source import Source


MOST = 2 << 30
"""Bytes of a library's buffer unless told otherwise."""
RUNAI_MOST = 512 << 20
"""The same of Run:ai's. Its own default, 40 GB, holds most models twice: of 2.6 GB, on two cores, a load took
5.1 GB with that, 4.4 GB with 2 GiB, 2.9 GB with 512 MiB and 2.7 GB with 300 MB. In six rounds, half of them
cold, 512 MiB was never slower than 2 GiB: memory that is used again need not be had from the system anew.
With 300 MB some cold loads were slower."""


class Request(Struct, frozen=True, kw_only=True):
    """What is to be read, into what, and how."""

    load_format: str
    paths: tuple[str, ...]
    """Of the weight files: absolute, or addresses below ``location``."""
    names: tuple[str, ...]
    """Of the tensors that are wanted; others may come, and are dropped."""
    nbytes: int
    """Of these tensors."""
    largest: int
    """Bytes of the largest tensor in the files."""
    device: str
    """Where the tensors are needed, as torch writes it: ``cpu``, ``cuda:0``."""
    options: Mapping[str, Any] = {}
    """``--model-loader-extra-config``, checked."""
    free: int = 0
    """Bytes of host memory that can be used now."""
    location: Location | None = None
    """None: the paths are files."""
    settings: CloudSettings | None = None
    """How ``location`` is reached."""
    sizes: Mapping[str, int] = {}
    """Bytes of each wanted tensor by name, in the order of the files."""
    source: Callable[[str], Source] | None = None
    """Opens one of the paths, to be read by ranges as hotstart's own readers do; None: they are files."""


def request_for(
    checkpoint: Checkpoint, matched: Matched, load: LoadConfig, device: str, free: int
) -> Request:
    """What a start asks of a library. ``free``: bytes of host memory that can be used now."""
    folder = checkpoint.folder
    store = getattr(folder, "store", None)
    files = {file.path: file for file in checkpoint.files}
    wanted = {ref.name for _, ref in matched.loads}
    return Request(
        load_format=load.load_format,
        paths=tuple(file.path for file in checkpoint.files),
        names=tuple(dict.fromkeys(ref.name for _, ref in matched.loads)),
        nbytes=matched.nbytes,
        largest=max((ref.nbytes for ref in checkpoint.tensors.values()), default=0),
        device=device,
        options=load.model_loader_extra_config,
        free=free,
        location=store.location if store is not None else None,
        settings=store.settings if store is not None else None,
        sizes={name: ref.nbytes for name, ref in checkpoint.tensors.items() if name in wanted},
        source=(lambda path: folder.source(files[path]))
        if folder is not None and store is not None
        else None,
    )


class Described(Struct, frozen=True):
    """One line of the log: who reads, and what it was told."""

    load_format: str
    concurrency: str = ""
    limit: str = ""
    notes: tuple[str, ...] = ()
    """Such as whether it reads directly, and why."""

    def __str__(self) -> str:
        parts = [library_of(self.load_format)]
        parts += [f"concurrency {self.concurrency}"] if self.concurrency else []
        parts += [f"memory limit {self.limit}"] if self.limit else []
        return ", ".join([*parts, *self.notes])


class TensorStream(Protocol):
    """Tensors of one load, once each, in any order."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor, on any device; its memory is good until the next one is asked for."""
        ...

    def describe(self) -> Described:
        """Library, version, and the concurrency and limit that were handed to it."""
        ...

    def close(self) -> None:
        """Give everything back, also in the middle of a load. Called once."""
        ...


class Adapter(Protocol):
    """A module of this room."""

    def plan(self, request: Request) -> Described:
        """What the library will be told. Torch-free. Raises ConfigError for what it cannot be told."""
        ...

    def open_stream(self, request: Request) -> TensorStream:
        """Begin. Imports the library; may raise anything."""
        ...


def adapter_of(load_format: str) -> Adapter:
    """The adapter of a format."""
    module: Any = import_module(f"hotstart.loading.streams.{FORMATS[load_format].module}")
    adapter: Adapter = module
    return adapter


def check_limit(request: Request) -> None:
    """Raise ConfigError for a memory limit into which the largest tensor does not fit."""
    limit = request.options.get("memory_limit")
    if limit is not None and 0 < limit < request.largest:
        raise ConfigError(
            f"--model-loader-extra-config: memory_limit is {limit}, and the largest tensor has "
            f"{request.largest} bytes",
            expected=f"at least {request.largest} ({format_size(request.largest)}), "
            "or 0 for the least that works",
        )


def library_of(load_format: str) -> str:
    """Name and version, for people: ``runai-model-streamer 0.17.1``."""
    name = FORMATS[load_format].distribution
    try:
        return f"{name} {version(name)}"
    except Exception:  # a library on the path without its metadata, or with damaged ones
        return f"{name} (version unknown)"


def bounded(request: Request) -> tuple[int, str]:
    """The memory limit to hand over, in bytes, and how a log says it; -1: none.

    Left out: a quarter of what is free, at most :data:`MOST` or :data:`RUNAI_MOST`, and never less than the
    largest tensor.
    """
    given = request.options.get("memory_limit")
    if given is None:
        most = RUNAI_MOST if request.load_format.startswith("runai_streamer") else MOST
        limit = min(request.free // 4, most)
        if request.largest > limit:
            return request.largest, f"{format_size(request.largest)} (its largest tensor)"
        return limit, f"{format_size(limit)} (a quarter of what is free, {format_size(most)} at most)"
    if given == -1:
        return -1, "none"
    limit = given or request.largest
    return limit, format_size(limit)


def buffer_of(request: Request) -> int:
    """Bytes that a library holds where the weights are, beside them; about, and at most."""
    if request.load_format.startswith("runai_streamer") and request.device != "cpu":
        return 0  # it lies in host memory
    if request.load_format == "instanttensor" and "memory_limit" not in request.options:
        return min(2 * MOST, request.nbytes)  # what its default depth takes
    limit, _ = bounded(request)
    return request.nbytes if limit == -1 else min(limit, request.nbytes)
