"""Run:ai Model Streamer: files of this machine, S3, Google Cloud Storage and Azure.

https://github.com/run-ai/runai-model-streamer. Its own variables (``RUNAI_STREAMER_…``) apply unless a
key of ``--model-loader-extra-config`` says the same; credentials and endpoint are those that the checks
have used.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hotstart.loading.streams.base import Described, Request, bounded
from hotstart.loading.streams.handed_over import for_runai

if TYPE_CHECKING:
    from torch import Tensor

_CONCURRENCY, _LIMIT = "RUNAI_STREAMER_CONCURRENCY", "RUNAI_STREAMER_MEMORY_LIMIT"


def open_stream(request: Request) -> RunaiStream:
    """See :class:`~hotstart.loading.streams.base.TensorStream`. Changes this process's environment."""
    return RunaiStream(request)


class RunaiStream:
    """Views into the library's buffer, which it fills again once they have been put."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._described = _configure(request)
        handed = None
        paths = list(request.paths)
        if request.location is not None and request.settings is not None:
            handed = for_runai(request.location, request.settings)
            os.environ.update(handed.variables)
            for name, value in handed.defaults.items():
                os.environ.setdefault(name, value)
            paths = [_address(request, path) for path in paths]
        library = importlib.import_module("runai_model_streamer")
        credentials = None
        if handed is not None and handed.s3 is not None:
            tools = importlib.import_module("runai_model_streamer.s3_utils.s3_utils")
            credentials = tools.S3Credentials(**handed.s3)
        distributed = bool(request.options.get("distributed", False))
        self._streamer: Any = library.SafetensorsStreamer()
        self._streamer.__enter__()
        try:
            self._streamer.stream_files(
                paths,
                s3_credentials=credentials,
                device=request.device if distributed else "cpu",
                is_distributed=distributed,
                tensor_names=request.names,
                owned=False,
            )
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        yield from self._streamer.get_tensors()

    def describe(self) -> Described:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        return self._described

    def close(self) -> None:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        self._streamer.__exit__(None, None, None)


def _configure(request: Request) -> Described:
    """Concurrency and limit, by the keys, else by the user's variables, else by us."""
    concurrency, said = request.options.get("concurrency"), "its own default"
    if concurrency is not None:
        os.environ[_CONCURRENCY] = said = str(concurrency)
    elif _CONCURRENCY in os.environ:
        said = f"{os.environ[_CONCURRENCY]} ({_CONCURRENCY})"
    if "memory_limit" not in request.options and _LIMIT in os.environ:
        shown = f"{os.environ[_LIMIT]} bytes ({_LIMIT})"
    else:
        limit, shown = bounded(request)
        os.environ[_LIMIT] = str(0 if request.options.get("memory_limit") == 0 else limit)
    return Described(request.load_format, said, shown)


def _address(request: Request, path: str) -> str:
    """A file of the location as the library writes it: an account of Azure's is no part of it."""
    location = request.location
    assert location is not None
    name = path[len(str(location)) + 1 :]
    return f"{location.scheme}://{location.container}/{location.key(name)}"
