"""From what stands on the command line to a target."""

from __future__ import annotations

from collections.abc import Mapping

from hotstart.convert.directory import Directory
from hotstart.convert.target import Target
from hotstart.errors import ConfigError
from hotstart.storage.location import is_location, parse_location, scheme_of, shown


def open_target(text: str, *, environ: Mapping[str, str], patience: float, memory_limit: int) -> Target:
    """A directory, or a folder of an object store. ``memory_limit``: bytes of weights in memory.

    Raises ConfigError for what cannot be written to.
    """
    if not scheme_of(text):
        return Directory(text)
    if is_location(text):
        location = parse_location(text)
        if not location.is_web:
            from hotstart.convert.bucket import Bucket

            return Bucket(location, environ=environ, patience=patience, memory_limit=memory_limit)
    raise ConfigError(
        f"{shown(text)} is no place to write to",
        expected="a directory, or an address that starts with s3://, gs:// or az://",
        advice="Write to a directory, and publish that",
    )
