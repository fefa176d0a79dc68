"""Which files of a directory are the model: one set, chosen by rule, the rest named and left alone.

The rule: the files that ``model.safetensors.index.json`` names; without it ``model.safetensors``;
without that every ``*.safetensors`` that is no copy. An index is believed only when it agrees with
the headers, because one that is older than the files makes a server that answers nonsense.
"""

from __future__ import annotations

import os
import re

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint, Skipped, TensorRef
from hotstart.checkpoint.files import read_json
from hotstart.checkpoint.refusals import no_directory, no_weights
from hotstart.checkpoint.safetensors import Header, read_header
from hotstart.checkpoint.wording import count, few
from hotstart.errors import HotstartError, ModelError, raise_all
from hotstart.storage.access import check_directory
from hotstart.units import format_size

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHER_FORMATS = (".gguf", ".tensors", ".h5", ".msgpack", ".onnx", ".npz")

_MAX_INDEX = 256 << 20
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_IGNORE_INDEX = "pass --ignore-index to go by the files on disk"


def open_checkpoint(path: str, *, ignore_index: bool = False) -> Checkpoint:
    """Choose the weight files of a directory and read their headers.

    Raises ModelError for what is absent, damaged or contradictory (all files at fault are reported
    together), StorageError for what cannot be read.
    """
    listing = _list(path)
    chosen = _choose(listing, ignore_index)
    absent = [name for name in chosen.names if not os.path.lexists(os.path.join(path, name))]
    headers, problems = _read_headers(path, [name for name in chosen.names if name not in absent])
    if absent:
        problems.insert(0, _absent_error(listing, chosen, absent))
    raise_all(problems)
    tensors = _merge(headers)
    _check_index(chosen, tensors)
    return Checkpoint(
        path=path,
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


class _Listing(Struct, frozen=True):
    """Weight files and their sizes by name; ``others``: other formats, and copies in ``original/``."""

    path: str
    names: list[str]
    safetensors: dict[str, int]
    others: dict[str, int]

    @property
    def models(self) -> list[str]:
        """The safetensors files that may be the model."""
        return sorted(name for name in self.safetensors if not name.startswith(("consolidated", "adapter_")))


class _Chosen(Struct, frozen=True):
    names: list[str]
    index: str | None = None
    weight_map: dict[str, str] = {}


def _list(path: str) -> _Listing:
    if not os.path.isdir(path):
        raise no_directory(path)
    check_directory(path)
    listing = _Listing(path, [], {}, {})
    with os.scandir(path) as entries:
        for entry in entries:
            listing.names.append(entry.name)
            if entry.name.endswith(".safetensors"):
                listing.safetensors[entry.name] = _size(entry)
            elif entry.name == "original" and entry.is_dir():
                with os.scandir(entry.path) as copies:
                    weights = [c for c in copies if c.name.endswith((".safetensors", *PICKLES))]
                    listing.others.update((f"original/{copy.name}", _size(copy)) for copy in weights)
            elif entry.name.endswith((*PICKLES, *OTHER_FORMATS)) and entry.name != "training_args.bin":
                listing.others[entry.name] = _size(entry)
    return listing


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return 0  # a dangling link: reading it gives the error that says so


def _choose(listing: _Listing, ignore_index: bool) -> _Chosen:
    """The rule of the module's docstring; names of absent files are among the result."""
    if INDEX in listing.names and not ignore_index:
        index = os.path.join(listing.path, INDEX)
        weight_map = _read_index(index)
        return _Chosen(sorted(set(weight_map.values())), index, weight_map)
    models = listing.models
    if SINGLE in models:
        return _Chosen([SINGLE])
    if not models:
        raise no_weights(listing.path, listing.names, [*listing.safetensors, *listing.others])
    numbered = [match for match in map(_NUMBERED.fullmatch, models) if match]
    expected = {
        f"{prefix}-{number:05}-of-{total}.safetensors"
        for prefix, total in {(match[1], match[3]) for match in numbered}
        for number in range(1, int(total) + 1)
    }
    return _Chosen(sorted({*models, *expected}))


def _read_index(path: str) -> dict[str, str]:
    """``weight_map`` of an index; every file it names is a safetensors file inside the directory."""
    weight_map = read_json(path, limit=_MAX_INDEX).get("weight_map")
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


def _read_headers(path: str, names: list[str]) -> tuple[list[Header], list[HotstartError]]:
    """Headers, and the problems of the files that have none; several at once, for distant storage."""

    def read(file: int) -> Header | HotstartError:
        try:
            return read_header(os.path.join(path, names[file]), file)
        except HotstartError as error:
            return error

    if len(names) <= 4:
        results = [read(file) for file in range(len(names))]
    else:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(read, range(len(names))))
    headers = [result for result in results if isinstance(result, Header)]
    return headers, [result for result in results if isinstance(result, HotstartError)]


def _merge(headers: list[Header]) -> dict[str, TensorRef]:
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


def _absent_error(listing: _Listing, chosen: _Chosen, absent: list[str]) -> ModelError:
    """Tells an old index from an incomplete copy by what the files on disk hold."""
    if not chosen.index:
        return ModelError(
            f"{count(len(absent), 'weight file')} absent from {listing.path}: {few(absent)}",
            expected="every file that the names of the others announce",
            advice="Copy or download the absent files",
        )
    headers, _ = _read_headers(listing.path, listing.models)
    stored = {ref.name for header in headers for ref in header.tensors}
    held = len(stored & chosen.weight_map.keys())
    complete = held == len(chosen.weight_map)
    return ModelError(
        f"{chosen.index} names {count(len(absent), 'absent file')} ({few(absent)}); "
        f"files on disk hold {held} of {len(chosen.weight_map)} expected tensors",
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

    sizes = {**listing.safetensors, **listing.others}
    return tuple(
        Skipped(name, sizes[name], reason(name)) for name in sorted(sizes) if name not in chosen.names
    )
