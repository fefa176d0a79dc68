"""From what stands on the command line to a target."""

from __future__ import annotations

from collections.abc import Mapping

from hotstart.convert.directory import Directory
from hotstart.convert.target import Target
from hotstart.errors import ConfigError
from hotstart.storage.location import scheme_of, shown


def open_target(text: str, *, environ: Mapping[str, str], patience: float) -> Target:
    """A directory, or a folder of an object store. Raises ConfigError."""
    scheme = scheme_of(text)
    if not scheme:
        return Directory(text)
    raise ConfigError(
        f"{shown(text)} is no place to write to",
        expected="a directory, or an address that starts with s3://, gs:// or az://",
        advice="Write to a directory, and publish that",
    )
