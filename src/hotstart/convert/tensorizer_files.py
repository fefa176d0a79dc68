"""``convert tensorizer``: files that the tensorizer library writes, one tensor in memory at a time.

A file holds a module as vLLM 0.32 saves one: parameters and buffers under vLLM's names, tied ones under
both, and a marker by which vLLM tells its own modules from others. Hashes of all tensors are in it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from hotstart.checkpoint.tensorizer import DEFAULT_NAME, MARKER, RANK_NAME, read_key
from hotstart.config.load_formats import FORMATS
from hotstart.convert.job import Plan, Writer
from hotstart.convert.origin import Origin
from hotstart.convert.planned import Planned, PlannedFile
from hotstart.convert.ranks import rank_tensors
from hotstart.convert.reading import Reader, Write
from hotstart.convert.target import Target
from hotstart.errors import ConfigError, HotstartError, StorageError
from hotstart.models.fused_names import is_scale
from hotstart.models.spec import DTYPES


def plan_tensorizer(origin: Origin, tensor_parallel: int) -> Plan:
    """A file for each rank. Raises ConfigError and ModelError."""
    names = [RANK_NAME % rank for rank in range(tensor_parallel)] if tensor_parallel > 1 else [DEFAULT_NAME]
    (tensors,) = rank_tensors(origin, tensor_parallel)
    return Plan((PlannedFile(tuple(names), tuple(tensors)),), named=True)


def tensorizer_writer(keyfile: str | None) -> Writer:
    """A writer that encrypts with the key in a file, if there is one.

    Raises ConfigError when the library is absent, or the file holds no key.
    """
    try:
        library = importlib.import_module("tensorizer")
    except ImportError:
        raise ConfigError(
            "The tensorizer library is not installed",
            expected="tensorizer, which writes these files",
            advice=f"Run {FORMATS['tensorizer'].install}",
        ) from None
    encryption = library.EncryptionParams(key=read_key(keyfile, "--encrypt")) if keyfile else None

    def write(reader: Reader, file: PlannedFile, target: Target, written: Callable[[int], None]) -> None:
        try:
            with ExitStack() as stack:
                paths = map(target.path, file.names)
                serializers = [_serializer(library, path, encryption, stack) for path in paths]
                _write_tensors(library, reader, file, serializers, written)
        except OSError as error:
            if isinstance(error, HotstartError):
                raise
            place = os.path.dirname(os.path.dirname(target.path(file.names[0])))
            raise StorageError(
                f"{target.shown}: a Tensorizer file cannot be written to {place}: "
                f"{error.strerror or error}; what was written is removed",
                advice="Make room there, then convert again",
            ) from None
        for name in file.names:
            target.adopt(name)

    return write


def _serializer(library: Any, path: str, encryption: Any, stack: ExitStack) -> Any:
    stream = stack.enter_context(open(path, "wb+"))  # noqa: SIM115 - the stack is one
    serializer = library.TensorSerializer(stream, encryption=encryption)
    stack.callback(serializer.close)
    return serializer


def _write_tensors(
    library: Any, reader: Reader, file: PlannedFile, serializers: list[Any], written: Callable[[int], None]
) -> None:
    import torch

    kinds = library.serialization.TensorType
    buffers: list[bytearray] = []
    number = 0

    def begin(tensor: Planned) -> Write:
        buffers[:] = [bytearray() for _ in serializers]
        return take

    def take(rank: int, data: memoryview | bytes) -> None:
        buffers[rank] += data
        written(len(data))

    def put(tensor: Planned) -> None:
        nonlocal number
        kind = kinds.BUFFER if is_scale(tensor.name) else kinds.PARAM
        dtype = getattr(torch, DTYPES[tensor.dtype][0])
        for serializer, data in zip(serializers, buffers, strict=True):
            value = torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)
            for place, name in enumerate((tensor.name, *tensor.also)):
                serializer.write_tensor(number + place, name, kind, value)
        number += 1 + len(tensor.also)
        buffers.clear()

    reader.deliver(file.tensors, begin, put)
    for serializer in serializers:
        serializer.write_tensor(number, f".{MARKER}", kinds.PARAM, torch.tensor((1,), device="meta"))
