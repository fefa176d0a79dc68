"""What goes wrong with ``hotstart convert``, provoked; docs/troubleshooting.md quotes the output."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from storage_symptoms import Place


def _convert(place: Place, kind: str, target: Path | str, *flags: str) -> str:
    return place.run("convert", kind, str(place.model), str(target), *flags)


def place_that_holds_something(place: Place) -> str:
    return _convert(place, "safetensors", place.model)


def _convert_without_room(place: Place, kind: str, target: Path | str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        full = shutil.disk_usage(place.folder)._replace(free=1000)
        patch.setattr(shutil, "disk_usage", lambda path: full)
        return _convert(place, kind, target)


def disk_without_room(place: Place) -> str:
    return _convert_without_room(place, "safetensors", place.folder / "new")


def temporary_directory_without_room(place: Place) -> str:
    place.set(**place.store.environ)
    return _convert_without_room(place, "tensorizer", "s3://models/new")


def ranks_that_do_not_divide(place: Place) -> str:
    return _convert(place, "sharded", place.folder / "new", "--tensor-parallel-size", "5")


def store_that_takes_nothing(place: Place) -> str:
    """It can only be read."""
    place.set(**place.store.environ)
    return _convert(place, "safetensors", "s3://models/new")


def file_without_a_key(place: Place) -> str:
    (place.folder / "key").write_bytes(b"short")
    return _convert(place, "tensorizer", place.folder / "new", "--encrypt", str(place.folder / "key"))


CONVERTING: dict[str, Callable[[Place], str]] = {
    "The place to convert to holds something": place_that_holds_something,
    "There is no room for the converted model": disk_without_room,
    "There is no room for files on their way to a store": temporary_directory_without_room,
    "The ranks cannot share the model": ranks_that_do_not_divide,
    "The store cannot be written to": store_that_takes_nothing,
    "The file of the key holds none": file_without_a_key,
}
