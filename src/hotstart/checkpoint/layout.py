"""Which files of a directory are the model: one set, chosen by rule, the rest named and left alone.

The rule: the files that ``model.safetensors.index.json`` names; without it ``model.safetensors``;
without that every ``*.safetensors`` that is no copy. An index is believed only when it agrees with
the headers, because one that is older than the files makes a server that answers nonsense.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint, Skipped, TensorRef
from hotstart.checkpoint.files import INDEX, SMALL_FILES, read_json
from hotstart.checkpoint.folder import Folder, LocalFolder
from hotstart.checkpoint.refusals import no_weights, pre_sharded
from hotstart.checkpoint.safetensors import Header
from hotstart.checkpoint.wording import count, few
from hotstart.errors import HotstartError, ModelError, raise_all
from hotstart.units import format_size

SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHER_FORMATS = (".gguf", ".tensors", ".h5", ".msgpack", ".onnx", ".npz")

_SLOW = 0.01
"""Seconds of a header that had to come from afar; one in the page cache takes a tenth of it."""
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_IGNORE_INDEX = "pass --ignore-index to go by the files that are there"

T = TypeVar("T")


def open_checkpoint(place: Folder | str, *, ignore_index: bool = False) -> Checkpoint:
    """Choose the weight files of a folder, or of the directory with this path, and read their headers.

    Raises ModelError for what is absent, damaged or contradictory (all files at fault are reported
    together), StorageError for what cannot be read.
    """
    folder = LocalFolder(place) if isinstance(place, str) else place
    listing = _Listing(folder)
    chosen = _choose(listing, ignore_index)
    headers, absent, problems = read_headers(folder, chosen.names)
    if absent:
        problems.insert(0, _absent_error(listing, chosen, absent, headers))
    raise_all(problems)
    tensors = merge_headers(headers)
    _check_index(chosen, tensors)
    return Checkpoint(
        path=folder.path,
        folder=folder,
        files=tuple(header.file for header in headers),
        tensors=tensors,
        skipped=_skipped(listing, chosen),
        index=chosen.index,
    )


def describe(checkpoint: Checkpoint) -> list[str]:
    """Log lines: the set that was chosen, what was left alone and why, and the bytes saved."""
    by = f", named by {os.path.basename(checkpoint.index)}" if checkpoint.index else ""
    files = count(len(checkpoint.files), "weight file")
    lines = [f"{files}{by}: {len(checkpoint.tensors)} tensors, {format_size(checkpoint.nbytes)}"]
    lines += [f"not read: {s.path}, {format_size(s.size)}: {s.reason}" for s in checkpoint.skipped]
    if len(checkpoint.skipped) > 1:
        lines.append(f"not read in all: {format_size(sum(s.size for s in checkpoint.skipped))}")
    return lines


class _Listing:
    """The files of a folder; listed once, and of an object store only when something depends on it."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.path = folder.path
        self.known: dict[str, int] | None = folder.sizes() if isinstance(folder, LocalFolder) else None

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file by name."""
        if self.known is None:
            self.known = self.folder.sizes()
        return self.known

    @property
    def names(self) -> list[str]:
        """Names in the folder itself."""
        return [name for name in self.sizes if "/" not in name]

    @property
    def models(self) -> list[str]:
        """The safetensors files that may be the model."""
        return sorted(
            name
            for name in self.names
            if name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter_"))
        )

    @property
    def weights(self) -> dict[str, int]:
        """Everything that may be weights: other formats too, and copies in ``original/``."""
        kinds = (".safetensors", *PICKLES)
        return {
            name: size
            for name, size in (self.known or {}).items()
            if name.endswith(kinds if name.startswith("original/") else (*kinds, *OTHER_FORMATS))
            and name != "training_args.bin"
            and name.count("/") == name.startswith("original/")
        }


class _Chosen(Struct, frozen=True):
    names: list[str]
    index: str | None = None
    """What messages call it."""
    weight_map: dict[str, str] = {}


def _choose(listing: _Listing, ignore_index: bool) -> _Chosen:
    """The rule of the module's docstring; names of absent files are among the result."""
    index = os.path.join(listing.folder.small_files, INDEX)
    if os.path.lexists(index) and not ignore_index:
        shown = os.path.join(listing.path, INDEX)
        weight_map = _read_index(index, shown)
        return _Chosen(sorted(set(weight_map.values())), shown, weight_map)
    models = listing.models
    if SINGLE in models:
        return _Chosen([SINGLE])
    if not models:
        raise no_weights(listing.path, listing.names, list(listing.weights))
    if (problem := pre_sharded(listing.path, models)) is not None:
        raise problem
    numbered = [match for match in map(_NUMBERED.fullmatch, models) if match]
    expected = {
        f"{prefix}-{number:05}-of-{total}.safetensors"
        for prefix, total in {(match[1], match[3]) for match in numbered}
        for number in range(1, int(total) + 1)
    }
    return _Chosen(sorted({*models, *expected}))


def _read_index(file: str, path: str) -> dict[str, str]:
    """``weight_map`` of an index; every file it names is a safetensors file inside the directory.

    ``path`` is what messages call the index.
    """
    weight_map = read_json(file, limit=SMALL_FILES[INDEX], shown=path).get("weight_map")
    if not (
        weight_map and isinstance(weight_map, dict) and all(isinstance(n, str) for n in weight_map.values())
    ):
        raise ModelError(
            f"{path} has no usable weight_map",
            expected="an object that gives each tensor its file",
            advice=f"Copy the index again, or {_IGNORE_INDEX}",
        )
    for name in sorted(set(weight_map.values())):
        if not name or "\0" in name or os.path.isabs(name) or ".." in name.split("/"):
            raise ModelError(
                f"{path} names the file {name!a}, which lies outside the model's directory",
                expected="names of files beside the index",
                advice="Find out who wrote this index before using the model",
            )
        if not name.endswith(".safetensors"):
            raise ModelError(
                f"{path} names the file {name!a}",
                expected="names that end in .safetensors",
                advice=f"Convert the weights to safetensors, or {_IGNORE_INDEX}",
            )
    return weight_map


def read_headers(folder: Folder, names: list[str]) -> tuple[list[Header], list[str], list[HotstartError]]:
    """Headers, names of absent files, problems of damaged ones; several at once, for distant storage.

    The header of ``names[n]`` has the file number n.
    """

    def read(file: int) -> Header | HotstartError | None:
        try:
            return folder.header(names[file], file)
        except HotstartError as error:
            return error

    local = isinstance(folder, LocalFolder)
    results = list(_until_slow(read, len(names))) if local else []
    if len(results) < len(names):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(8 if local else 32) as pool:
            results += pool.map(read, range(len(results), len(names)))
    return (
        [result for result in results if isinstance(result, Header)],
        [name for name, result in zip(names, results, strict=True) if result is None],
        [result for result in results if isinstance(result, HotstartError)],
    )


def _until_slow(read: Callable[[int], T], count: int) -> Iterator[T]:
    """Read one after the other while each is at hand: threads would only get in each other's way."""
    for file in range(count):
        began = time.monotonic()
        yield read(file)
        if time.monotonic() - began > _SLOW:
            return


def merge_headers(headers: list[Header]) -> dict[str, TensorRef]:
    """Every tensor by name. Raises ModelError for one that is stored twice."""
    tensors: dict[str, TensorRef] = {}
    stored = [ref for header in headers for ref in header.tensors]
    repeated = [ref for ref in stored if tensors.setdefault(ref.name, ref) is not ref]
    if repeated:
        first, again = (
            os.path.basename(headers[ref.file].file.path) for ref in (tensors[repeated[0].name], repeated[0])
        )
        raise ModelError(
            f"{count(len(repeated), 'tensor')} stored in more than one file of "
            f"{os.path.dirname(headers[0].file.path)}: '{repeated[0].name}' in {first} and in {again}",
            expected="each tensor once",
            advice="Two sets of weight files probably lie in this directory: move one of them away",
        )
    return tensors


def _absent_error(listing: _Listing, chosen: _Chosen, absent: list[str], headers: list[Header]) -> ModelError:
    """Tells an old index from an incomplete copy by what the files that are there hold."""
    if not chosen.index:
        return ModelError(
            f"{count(len(absent), 'weight file')} absent from {listing.path}: {few(absent)}",
            expected="every file that the names of the others announce",
            advice="Copy or download the absent files",
        )
    try:
        others = [name for name in listing.models if name not in chosen.names]
    except HotstartError:
        others = []  # a listing that is refused is not what is wrong
    # Who writes such a directory copies the plain one's index too.
    if (problem := pre_sharded(listing.path, others)) is not None:
        return problem
    more, _, _ = read_headers(listing.folder, others)
    stored = {ref.name for header in (*headers, *more) for ref in header.tensors}
    held = len(stored & chosen.weight_map.keys())
    complete = held == len(chosen.weight_map)
    where = "on disk" if isinstance(listing.folder, LocalFolder) else "there"
    return ModelError(
        f"{chosen.index} names {count(len(absent), 'absent file')} ({few(absent)}); "
        f"files {where} hold {held} of {len(chosen.weight_map)} expected tensors",
        expected="every file that the index names",
        advice=f"The files are complete and the index is older than they are: {_IGNORE_INDEX}"
        if complete
        else "Copy or download the absent files",
    )


def _check_index(chosen: _Chosen, tensors: dict[str, TensorRef]) -> None:
    """Raise where the index and the headers disagree."""
    problems: list[HotstartError] = []
    actual = {name: chosen.names[ref.file] for name, ref in tensors.items()}
    lost = [name for name in chosen.weight_map if name not in actual]
    moved = [name for name, file in chosen.weight_map.items() if actual.get(name, file) != file]
    if lost:
        files = sorted({chosen.weight_map[name] for name in lost})
        problems.append(
            ModelError(
                f"{chosen.index} names {count(len(lost), 'tensor')} that no file holds: {few(lost)}",
                expected=f"to find them in {few(files)}",
                advice=f"Copy these files again; if they are newer than the index, {_IGNORE_INDEX}",
            )
        )
    if moved:
        problems.append(
            ModelError(
                f"{chosen.index} puts {count(len(moved), 'tensor')} in the wrong file: "
                f"'{moved[0]}' is in {actual[moved[0]]}",
                expected=f"to find it in {chosen.weight_map[moved[0]]}",
                advice=f"If the files are newer than the index, {_IGNORE_INDEX}",
            )
        )
    raise_all(problems)


def _skipped(listing: _Listing, chosen: _Chosen) -> tuple[Skipped, ...]:
    by = f"not named by {INDEX}" if chosen.index else f"{SINGLE} holds the model"

    def reason(name: str) -> str:
        if name.startswith("original/"):
            return "a copy in the publisher's layout"
        if name.startswith("consolidated"):
            return "a consolidated copy of the same weights"
        if name.startswith("adapter_"):
            return "an adapter, not the model"
        if name.endswith(PICKLES):
            return "pickled weights are never loaded"
        return "another format" if name.endswith(OTHER_FORMATS) else by

    sizes = listing.weights
    return tuple(
        Skipped(name, sizes[name], reason(name)) for name in sorted(sizes) if name not in chosen.names
    )
