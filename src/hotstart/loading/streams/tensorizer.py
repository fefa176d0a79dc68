"""CoreWeave's Tensorizer: files of its own format, from a directory, a web server or S3.

https://github.com/coreweave/tensorizer. Downloads go through ``curl``, as always with this library; it
is given an address that hotstart has signed, so credentials of every source work, and none is handed on.
The library keeps every tensor it gave, and reads ahead without a bound: it is asked for as many at a time
as the memory limit has room for, and made to forget them.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hotstart.errors import ConfigError, HotstartError, ModelError, StorageError
from hotstart.loading.streams.base import Described, Request, bounded, check_limit, library_of
from hotstart.loading.tensorizer_options import TensorizerOptions

if TYPE_CHECKING:
    from torch import Tensor

_AGAIN = "Copy the file again, or write it again: hotstart convert tensorizer SRC DST"


def plan(request: Request) -> Described:
    """See :class:`~hotstart.loading.streams.base.Adapter`."""
    check_limit(request)
    if request.location is not None and shutil.which("curl") is None:
        raise ConfigError(
            f"--load-format tensorizer needs curl to read {request.location}, and there is none in PATH",
            expected="the program curl",
            advice="Install it (apt install curl), or read the model from a directory",
        )
    options = TensorizerOptions.parse(request.options)
    notes = ["hashes are " + ("compared" if options.verify_hash else "not compared (verify_hash is false)")]
    if options.keyfile:
        notes.append(f"decrypts with {options.keyfile}")
    if request.settings is not None:
        notes.append(f"reached by {request.settings.described}")
    _, limit = bounded(request)
    readers = "its own choice" if options.num_readers is None else str(options.num_readers)
    return Described(request.load_format, readers, limit, tuple(notes))


def open_stream(request: Request) -> TensorizerStream:
    """See :class:`~hotstart.loading.streams.base.Adapter`."""
    return TensorizerStream(request)


class TensorizerStream:
    """See :class:`~hotstart.loading.streams.base.TensorStream`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._described = plan(request)
        self._options = TensorizerOptions.parse(request.options)
        self._library = importlib.import_module("tensorizer")
        self._streams = importlib.import_module("tensorizer.stream_io")
        self._opened = self._open(self._options.num_readers)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        for batch in self._batches():
            try:
                for _, _, name, tensor in self._opened.read_tensors(num_tensors=len(batch)):
                    yield name, tensor.data
            except Exception as error:
                raise self._named(error) from error
            _forget(self._opened)

    def describe(self) -> Described:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        return self._described

    def held(self) -> list[Any]:
        """What the library keeps of each tensor; None: nothing."""
        return list(self._opened._cache.values())

    def close(self) -> None:
        """See :class:`~hotstart.loading.streams.base.TensorStream`."""
        self._opened.close()

    def _open(self, readers: int | None) -> Any:
        path, stream = self._request.paths[0], {}
        if self._request.address is not None:
            path = self._request.address(path)
            ca_file = self._request.settings.ca_file if self._request.settings is not None else ""
            if ca_file:
                stream["certificate_handling"] = self._streams.CAInfo(cacert=ca_file)
        if self._options.buffer_size is not None:
            stream["buffer_size"] = self._options.buffer_size
        wanted = set(self._request.names)
        return self._library.TensorDeserializer(
            self._streams.open_stream(path, "rb", **stream),
            device=self._request.device,
            filter_func=lambda name: name in wanted,
            lazy_load=True,
            num_readers=readers,
            verify_hash=self._options.verify_hash,
            encryption=self._key(),
        )

    def _key(self) -> Any:
        if self._options.keyfile is None:
            return None
        with open(self._options.keyfile, "rb") as file:
            return self._library.DecryptionParams.from_key(file.read())

    def _batches(self) -> Iterator[list[str]]:
        """The wanted tensors in the order of the file, as many at a time as the limit has room for."""
        limit, _ = bounded(self._request)
        if self._request.options.get("memory_limit") == 0:
            limit = 0
        batch: list[str] = []
        room = limit
        for name, nbytes in self._request.sizes.items():
            if batch and limit != -1 and nbytes > room:
                yield batch
                batch, room = [], limit
            batch.append(name)
            room -= nbytes
        if batch:
            yield batch

    def _named(self, error: Exception) -> Exception:
        """The error with the tensor at fault, which the library does not always say."""
        if isinstance(error, HotstartError) or type(error).__name__ == "CURLError":
            return error
        name = self._first_at_fault()
        if not name:
            return error
        path = self._request.paths[0]
        if type(error).__name__ == "HashMismatchError":
            return ModelError(
                f"{path} is damaged: the tensor {name} has not the hash that was written with it",
                expected="the bytes that were written",
                advice=_AGAIN,
            )
        if type(error).__name__ == "CryptographyError":
            return ModelError(
                f"{path}: the tensor {name} cannot be decrypted with {self._options.keyfile}",
                expected="the key that it was encrypted with, and a whole file",
                advice="Pass that key as encryption_keyfile; if it is, copy the file again",
            )
        library = library_of(self._request.load_format)
        return StorageError(
            f"{library} failed at the tensor {name} of {path}: {type(error).__name__}: {error}", advice=_AGAIN
        )

    def _first_at_fault(self) -> str:
        """By reading once more, one after the other; empty: this time all were right."""
        done = 0
        again = self._open(1)
        try:
            for _ in again.read_tensors():
                done += 1
                _forget(again)
        except Exception:
            return list(self._request.sizes)[done]
        finally:
            again.close()
        return ""


def _forget(deserializer: Any) -> None:
    """Let go of tensors that were given."""
    for key in deserializer._cache:
        deserializer._cache[key] = None
