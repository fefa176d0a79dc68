"""The files of a folder in an object store, and what lies near a folder that does not exist."""

from __future__ import annotations

import re
from difflib import get_close_matches
from html import unescape
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from hotstart.errors import ModelError

if TYPE_CHECKING:
    from hotstart.storage.location import Location

_COPIES = "original"
"""The one folder below a model's that is looked into: publishers keep their own layout there."""
_SHOWN = 5


class ObjectInfo(Struct, frozen=True):
    """What a listing says of an object."""

    size: int
    etag: str


def list_folder(client: Any, location: Location) -> dict[str, ObjectInfo]:
    """The objects of a folder and of ``original/`` in it, by name relative to it; all pages of them.

    Other folders are not entered: the root of a bucket may hold millions of objects. ``client`` is
    the bucket as ``obstore`` has it, whose exceptions come through. Raises ModelError that names the
    nearest folders when there is none.
    """
    import obstore

    prefix = location.prefix
    listing = obstore.list_with_delimiter(client, prefix or None)
    found = _named(prefix, listing["objects"])
    if location.key(_COPIES) in listing["common_prefixes"]:
        copies = obstore.list_with_delimiter(client, location.key(_COPIES))
        found |= _named(prefix, copies["objects"])
    if not found:
        raise _nothing(client, location, listing["common_prefixes"])
    return found


def list_names(client: Any, prefix: str) -> list[str]:
    """The names of the objects of a folder; none where there is no such folder."""
    import obstore

    return list(_named(prefix, obstore.list_with_delimiter(client, prefix)["objects"]))


def names_in(listing: bytes, prefix: str) -> list[str]:
    """The names of the objects of a folder, from a page of XML as S3, Google and Azure write it."""
    keys = [unescape(found.decode()) for found in re.findall(rb"<(?:Key|Blob><Name)>([^<]*)<", listing)]
    start = f"{prefix}/"
    return [key[len(start) :] for key in keys if key.startswith(start) and key != start]


def _named(prefix: str, objects: Any) -> dict[str, ObjectInfo]:
    infos = {meta["path"][len(prefix) :].lstrip("/"): meta for meta in objects}
    # A folder made by a cloud's own pages is an empty object of its name.
    return {name: ObjectInfo(meta["size"], meta["e_tag"] or "") for name, meta in infos.items() if name}


def _nothing(client: Any, location: Location, folders: Any) -> ModelError:
    if folders:
        shown = ", ".join(sorted(folders)[:_SHOWN])
        return ModelError(
            f"{location} holds folders and no files: {shown}",
            expected="the folder of one model",
            advice=f"Pass one of them, such as {_at(location, sorted(folders)[0])}",
        )
    return ModelError(
        f"There is nothing in {location}", expected="the folder of a model", advice=nearest(client, location)
    )


def nearest(client: Any, location: Location) -> str:
    """Which folders there are where this one is absent, the most alike first."""
    import obstore

    names = location.prefix.split("/") if location.prefix else []
    while names:
        absent = names.pop()
        parent = "/".join(names)
        try:
            listing = obstore.list_with_delimiter(client, parent or None)
        except Exception:
            return "Check bucket and prefix"  # this is advice on another error, and may fail itself
        folders = sorted(path.rpartition("/")[2] for path in listing["common_prefixes"])
        if not folders:
            continue
        where = _at(location, parent)
        folded = {folder.lower(): folder for folder in folders}
        if near := get_close_matches(absent.lower(), folded, n=3, cutoff=0.6):
            start = f"{parent}/" if parent else ""
            return "Did you mean " + " or ".join(_at(location, start + folded[name]) for name in near) + "?"
        more = f" and {len(folders) - _SHOWN} more" if len(folders) > _SHOWN else ""
        return f"{where} holds the folders {', '.join(folders[:_SHOWN])}{more}"
    return "The bucket is empty, or the endpoint is another than it was uploaded to"


def _at(location: Location, prefix: str) -> str:
    return f"{location.scheme}://{location.container}" + (f"/{prefix}" if prefix else "")
