"""fastsafetensors: files of this machine, into memory or a GPU, directly where GPUDirect Storage works.

https://github.com/foundation-model-stack/fastsafetensors. Its loader goes on without GPUDirect Storage
when that fails, and only warns: whether it read directly is asked of it beforehand and taken from its
warnings afterwards, so that the log always says so.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hotstart.loading.streams.base import Described, Request, bounded

if TYPE_CHECKING:
    from torch import Tensor

_DRIVER = "/proc/driver/nvidia-fs"
_THREADS = 16
"""The library's own default."""


def plan(request: Request) -> Described:
    """See :class:`~hotstart.loading.streams.base.Adapter`."""
    threads = request.options.get("concurrency")
    said = str(threads) if threads else f"{_THREADS} (its own default)"
    return Described(request.load_format, said, bounded(request)[1])


def open_stream(request: Request) -> FastStream:
    """See :class:`~hotstart.loading.streams.base.TensorStream`."""
    return FastStream(request)


class FastStream:
    """Views into one part of a file at a time, and the next one beside it."""

    def __init__(self, request: Request) -> None:
        library = importlib.import_module("fastsafetensors")
        on_gpu = request.device != "cpu"
        self._direct, self._why = direct(library.cpp, request.device)
        self._warned = _Warnings()
        logging.getLogger("fastsafetensors").addHandler(self._warned)
        threads = request.options.get("concurrency")
        limit, _ = bounded(request)
        wanted = frozenset(request.names)
        self._described = plan(request)
        self._loader: Any = library.ParallelLoader(
            None,
            sorted(request.paths),
            queue_size=0 if limit == -1 or limit >= 2 * request.largest else -1,
            use_tqdm_on_load=False,
            device=request.device,
            max_threads=threads or _THREADS,
            nogds=not self._direct,
            set_numa=on_gpu,
            tensor_filter=wanted.__contains__,
            all_local=True,
            max_batch_bytes=None if limit == -1 else max(limit // 2, request.largest),
            accumulate_resident=False,
            borrowed_tensors=True,
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        yield from self._loader.iterate_weights()

    def describe(self) -> Described:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        direct, why = self._direct, self._why
        fell_back = [text for text in self._warned.texts if "gds" in text.lower()]
        if direct and fell_back:
            direct, why = False, fell_back[0]
        note = f"direct: {'yes' if direct else 'no'}, because {why}"
        described = self._described
        return Described(described.load_format, described.concurrency, described.limit, (note,))

    def close(self) -> None:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        logging.getLogger("fastsafetensors").removeHandler(self._warned)
        self._loader.close()


def direct(cpp: Any, device: str, driver: str = _DRIVER) -> tuple[bool, str]:
    """Whether GPUDirect Storage can be used, and why. ``cpp`` is the library's native part."""
    if device == "cpu":
        return False, "the weights go into memory, not into a GPU"
    index = int(device.partition(":")[2] or 0)
    if not cpp.is_cuda_found():
        return False, "the library finds no CUDA driver"
    if not cpp.is_cufile_found():
        return False, "libcufile is not installed, which GPUDirect Storage needs"
    if not os.path.exists(driver):
        return False, "the driver nvidia-fs is not loaded, without which libcufile reads through memory"
    if cpp.is_gds_supported(index) <= 0:
        return False, f"GPU {index} does not support GPUDirect Storage"
    return True, "libcufile and nvidia-fs are there, and the GPU supports GPUDirect Storage"


class _Warnings(logging.Handler):
    """What the library says of its own accord."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.texts.append(record.getMessage())
