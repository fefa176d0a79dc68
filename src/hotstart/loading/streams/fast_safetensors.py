"""fastsafetensors: files of this machine, into memory or a GPU, directly where GPUDirect Storage works.

https://github.com/foundation-model-stack/fastsafetensors. Its loader goes on without GPUDirect Storage
when that fails, and only warns: whether it read directly is asked of it beforehand and taken from its
warnings afterwards, so that the log always says so. What it answers is true only once it has looked for
the libraries, which it does on demand: until then it finds no GPU anywhere.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hotstart.errors import ConfigError
from hotstart.loading.streams.base import Described, Request, bounded
from hotstart.loading.streams.gpu_direct import DRIVER, NODE, obstacle

if TYPE_CHECKING:
    from torch import Tensor

_RUNTIME, _CUFILE = "libcudart.so", "libcufile.so.0"
"""As the library opens them."""
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
        self._direct, self._why = direct(library.cpp, request.device, request.paths)
        # It warns of a file that it cannot read directly once a process; every load is to say so.
        copier: Any = importlib.import_module("fastsafetensors.copier.gds")
        copier._warned_gds_fallback = False
        self._warned = _Warnings()
        self._described = plan(request)
        with ExitStack() as undo:
            logger = logging.getLogger("fastsafetensors")
            logger.addHandler(self._warned)
            undo.callback(logger.removeHandler, self._warned)
            self._loader = self._open(library, request)
            undo.pop_all()

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

    def _open(self, library: Any, request: Request) -> Any:
        threads = request.options.get("concurrency")
        limit, _ = bounded(request)
        wanted = frozenset(request.names)
        return library.ParallelLoader(
            None,
            sorted(request.paths),
            queue_size=0 if limit == -1 or limit >= 2 * request.largest else -1,
            use_tqdm_on_load=False,
            device=request.device,
            max_threads=threads or _THREADS,
            nogds=not self._direct,
            set_numa=request.device != "cpu",
            tensor_filter=wanted.__contains__,
            all_local=True,
            max_batch_bytes=None if limit == -1 else max(limit // 2, request.largest),
            accumulate_resident=False,
            borrowed_tensors=True,
        )


def direct(
    cpp: Any, device: str, paths: Sequence[str] = (), driver: str = DRIVER, node: str = NODE
) -> tuple[bool, str]:
    """Whether GPUDirect Storage can be used, and why. ``cpp`` is the library's native part.

    Raises ConfigError where the library has no CUDA: it then loads into no GPU at all.
    """
    if device == "cpu":
        return False, "the weights go into memory, not into a GPU"
    if not cpp.is_cuda_found():
        cpp.load_library_functions(_RUNTIME)
    if not cpp.is_cuda_found():
        raise _no_cuda()
    index = int(device.partition(":")[2] or 0)
    if not cpp.is_cufile_found():
        return False, f"{_CUFILE} is not on the library path, which GPUDirect Storage needs"
    if because := obstacle(paths, driver, node):
        return False, because
    if cpp.is_gds_supported(index) <= 0:
        return False, f"GPU {index} does not support GPUDirect Storage"
    return True, "libcufile and nvidia-fs are there, and the GPU supports GPUDirect Storage"


def _no_cuda() -> ConfigError:
    """The library does not tell these two apart, and they need different things."""
    try:
        ctypes.CDLL(_RUNTIME)
    except OSError:
        return ConfigError(
            f"fastsafetensors finds no {_RUNTIME}, by which it reaches a GPU",
            expected=f"a {_RUNTIME} on the library path; PyTorch's own has another name",
            advice="Install the CUDA toolkit, or name its directory (export LD_LIBRARY_PATH="
            "/usr/local/cuda/lib64); or leave --load-format out",
        )
    return ConfigError(
        f"fastsafetensors opened {_RUNTIME}, which finds no GPU",
        expected="a CUDA driver at least as new as that library",
        advice="Update the driver, or put an older CUDA toolkit on the library path; or leave "
        "--load-format out",
    )


class _Warnings(logging.Handler):
    """What the library says of its own accord."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text."""
        self.texts.append(record.getMessage())
