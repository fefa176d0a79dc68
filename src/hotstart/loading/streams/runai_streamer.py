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

    from hotstart.storage.location import Location

_CONCURRENCY, _LIMIT = "RUNAI_STREAMER_CONCURRENCY", "RUNAI_STREAMER_MEMORY_LIMIT"


def plan(request: Request) -> Described:
    """See :class:`~hotstart.loading.streams.base.Adapter`: keys go before the user's variables."""
    if request.location is not None and request.settings is not None:
        for_runai(request.location, request.settings)
    concurrency = str(request.options.get("concurrency", ""))
    if not concurrency:
        given = os.environ.get(_CONCURRENCY)
        concurrency = f"{given} ({_CONCURRENCY})" if given else "its own default"
    limit = f"{os.environ[_LIMIT]} bytes ({_LIMIT})" if _own_limit(request) else bounded(request)[1]
    return Described(request.load_format, concurrency, limit)


def open_stream(request: Request) -> RunaiStream:
    """See :class:`~hotstart.loading.streams.base.Adapter`. It changes the environment until it is closed."""
    return RunaiStream(request)


class RunaiStream:
    """Views into the library's buffer, which it fills again once they have been put."""

    def __init__(self, request: Request) -> None:
        self._described = plan(request)
        self._streamer: Any = None
        self._before: dict[str, str | None] = {}
        try:
            self._open(request)
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
        """See :class:`~hotstart.loading.streams.base.TensorStream`. The environment is as it was."""
        try:
            if self._streamer is not None:
                self._streamer.__exit__(None, None, None)
        finally:
            for name, value in self._before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _open(self, request: Request) -> None:
        variables, credentials, paths = _variables(request), None, list(request.paths)
        handed = None
        if request.location is not None and request.settings is not None:
            handed = for_runai(request.location, request.settings)
            variables |= handed.variables
            variables |= {name: os.environ.get(name, value) for name, value in handed.defaults.items()}
            paths = addresses(request.location, paths)
        for name, value in variables.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value
        library = importlib.import_module("runai_model_streamer")
        if handed is not None and handed.s3 is not None:
            tools = importlib.import_module("runai_model_streamer.s3_utils.s3_utils")
            credentials = tools.S3Credentials(**handed.s3)
        distributed = bool(request.options.get("distributed", False))
        self._streamer = library.SafetensorsStreamer()
        self._streamer.__enter__()
        self._streamer.stream_files(
            paths,
            s3_credentials=credentials,
            device=request.device if distributed else "cpu",
            is_distributed=distributed,
            tensor_names=request.names,
            owned=False,
        )


def _variables(request: Request) -> dict[str, str]:
    """The library looks at the environment for what :func:`plan` has."""
    variables = {}
    if "concurrency" in request.options:
        variables[_CONCURRENCY] = str(request.options["concurrency"])
    if not _own_limit(request):
        least = request.options.get("memory_limit") == 0
        variables[_LIMIT] = str(0 if least else bounded(request)[0])
    return variables


def _own_limit(request: Request) -> bool:
    """Whether the limit is the user's variable."""
    return "memory_limit" not in request.options and bool(os.environ.get(_LIMIT))


def addresses(location: Location, paths: list[str]) -> list[str]:
    """Files of a location as the library writes them: an account of Azure's is no part of it."""
    names = [path[len(str(location)) + 1 :] for path in paths]
    return [f"{location.scheme}://{location.container}/{location.key(name)}" for name in names]
