"""InstantTensor: files of this machine into an NVIDIA GPU.

https://github.com/scitix/InstantTensor. Its own variables (``INSTANTTENSOR_…``) apply unless a key of
``--model-loader-extra-config`` says the same.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hotstart.loading.streams.base import Described, Request
from hotstart.loading.streams.gpu_direct import obstacle
from hotstart.units import format_size

if TYPE_CHECKING:
    from torch import Tensor

_LEAST = 32 << 20
"""Bytes of buffer that hold one read of its usual size, aligned."""


def plan(request: Request) -> Described:
    """See :class:`~hotstart.loading.streams.base.Adapter`."""
    depth, buffer = request.options.get("concurrency"), _buffer(request)
    return Described(
        request.load_format,
        str(depth) if depth else _own("INSTANTTENSOR_IO_DEPTH"),
        format_size(buffer) if buffer is not None else _own("INSTANTTENSOR_BUFFER_SIZE"),
    )


def open_stream(request: Request) -> InstantStream:
    """See :class:`~hotstart.loading.streams.base.TensorStream`."""
    return InstantStream(request)


class InstantStream:
    """Views into its ring on the GPU, which go when the next tensor is asked for."""

    def __init__(self, request: Request) -> None:
        library = importlib.import_module("instanttensor")
        # It warns about what is the case here: a view is used before the next one is asked for.
        warnings.filterwarnings("ignore", message="copy=False with buffer_size")
        self._described = plan(request)
        self._paths = request.paths
        self._file: Any = library.safe_open(
            list(request.paths),
            framework="pt",
            device=request.device,
            buffer_size=_buffer(request),
            io_depth=request.options.get("concurrency"),
            copy=False,
            tensor_filter=list(request.names),
            tensor_name_match_mode="exact",
        )
        self._file.__enter__()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        yield from self._file.tensors()

    def describe(self) -> Described:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        described = self._described
        note = direct(self._file.backend.name, self._paths)
        return Described(described.load_format, described.concurrency, described.limit, (note,))

    def close(self) -> None:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        self._file.__exit__(None, None, None)


def direct(backend: str, paths: Sequence[str]) -> str:
    """How the library's back end brings bytes to the GPU, which it chose by itself or was told."""
    if backend != "CUFILE":
        how = "maps the files" if backend == "MMAP" else "reads into memory first"
        return f"direct: no, because its back end {backend} {how} (INSTANTTENSOR_BACKEND=CUFILE does not)"
    if because := obstacle(paths):
        return f"direct: up to libcufile, because its back end is CUFILE, but {because}"
    return "direct: yes, because its back end is CUFILE, and nvidia-fs is there"


def _buffer(request: Request) -> int | None:
    """Bytes; None: the library decides."""
    limit = request.options.get("memory_limit")
    if limit is None or limit == -1:
        return None
    return int(limit) or max(request.largest, _LEAST)


def _own(variable: str) -> str:
    given = os.environ.get(variable)
    return f"{given} ({variable})" if given else "its own default"
