"""CoreWeave's Tensorizer: files of its own format, from a directory, a web server or a store.

https://github.com/coreweave/tensorizer. It would download by ``curl``, whose arguments everybody on the
machine can read, and whose signed address ends within a load: what lies elsewhere it is given as an open
file over hotstart's own ranges. The library keeps every tensor it gave, and reads ahead without a bound:
it is asked for as many at a time as the memory limit has room for, and made to forget them.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hotstart.checkpoint.tensorizer import read_key
from hotstart.errors import HotstartError, ModelError, StorageError
from hotstart.loading.streams.base import Described, Request, bounded, check_limit, library_of
from hotstart.loading.streams.stored_file import AHEAD, Ranges, StoredFile
from hotstart.loading.tensorizer_options import TensorizerOptions

if TYPE_CHECKING:
    from torch import Tensor

_READERS = 8
"""Ranges of a store at once unless told otherwise."""
_DAMAGED = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError, struct.error)
"""What the library raises of a tensor's header that makes no sense."""
_AGAIN = "Copy the file again, or write it again: hotstart convert tensorizer SRC DST"


def plan(request: Request) -> Described:
    """See :class:`~hotstart.loading.streams.base.Adapter`."""
    check_limit(request)
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
        self._ranges: Ranges | None = None
        with ExitStack() as undo:
            if request.source is not None:
                most = self._options.num_readers or _READERS
                self._ranges = Ranges(request.source(request.paths[0]), most)
                undo.callback(self._ranges.close)
            self._opened = self._open(self._options.num_readers)
            undo.pop_all()

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
        try:
            self._opened.close()
        finally:
            if self._ranges is not None:
                self._ranges.close()

    def _open(self, readers: int | None) -> Any:
        wanted = set(self._request.names)
        with ExitStack() as undo:
            file = undo.enter_context(self._file())
            opened = _deserializer(self._library.TensorDeserializer, self._file)(
                file,
                device=self._request.device,
                filter_func=lambda name: name in wanted,
                lazy_load=True,
                num_readers=readers,
                verify_hash=self._options.verify_hash,
                encryption=self._key(),
            )
            undo.pop_all()  # it closes its file
        return opened

    def _file(self, begin: int = 0, end: int | None = None) -> Any:
        """The file once more, for another thread."""
        if self._ranges is None:
            file = open(self._request.paths[0], "rb")  # noqa: SIM115 - whoever asked closes it
            file.seek(begin)
            return file
        ahead = self._options.buffer_size or AHEAD
        return StoredFile(self._ranges, ahead=ahead, at=begin, end=end)

    def _key(self) -> Any:
        if self._options.keyfile is None:
            return None
        return self._library.DecryptionParams.from_key(read_key(self._options.keyfile, "encryption_keyfile"))

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
        if isinstance(error, HotstartError):
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
        # A header may also say that it has more bytes than there is memory.
        absurd = isinstance(error, MemoryError) and 4 * self._request.sizes[name] < self._request.free
        if absurd or isinstance(error, _DAMAGED):
            return ModelError(
                f"{path} is damaged: the header of the tensor {name} cannot be read "
                f"({type(error).__name__}: {error})",
                expected="the bytes that were written",
                advice=_AGAIN,
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


def _deserializer(base: Any, reopen: Callable[..., Any]) -> Any:
    """The library's class, whose readers each open the file in this way; it knows no other open files."""

    class Deserializer(base):  # type: ignore[misc]
        def _reopen_func(self) -> Callable[..., Any]:
            return reopen

    return Deserializer
