"""Settings from environment variables: the first that is set, and which one it was."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from hotstart.errors import ConfigError


class Value(Struct, frozen=True):
    """A setting; falsy when nothing sets it."""

    text: str = ""
    origin: str = ""
    """The variable, file or rule it came from."""

    def __bool__(self) -> bool:
        return bool(self.text)

    @property
    def yes(self) -> bool:
        """Whether it switches something on."""
        return self.text.lower() in ("1", "true", "yes", "on", "requester")

    def __str__(self) -> str:
        return f"{self.text} ({self.origin})"


def option(key: str) -> str:
    """The name under which a loader's option stands among the variables; no variable has such a name."""
    return f"{key} in --model-loader-extra-config"


def with_options(environ: Mapping[str, str], given: Mapping[str, Any]) -> Mapping[str, str]:
    """The variables, and what ``--model-loader-extra-config`` says of S3, which goes before them."""
    nested = given.get("tensorizer_config")
    every = {**given, **nested} if isinstance(nested, Mapping) else given
    said = {option(key): value for key, value in every.items() if key.startswith("s3_")}
    return {**environ, **said} if said else environ


def first(environ: Mapping[str, str], *names: str) -> Value:
    """The first variable that is set and not empty."""
    for name in names:
        if text := environ.get(name, "").strip():
            return Value(text, name)
    return Value()


def switch(environ: Mapping[str, str], *names: str) -> Value:
    """The first variable that is set to anything but no; falsy for ``0`` and ``false`` too."""
    for name in names:
        value = first(environ, name)
        if value.yes:
            return value
    return Value()


def home(environ: Mapping[str, str]) -> str:
    """The directory that ``~`` stands for."""
    return environ.get("HOME") or os.path.expanduser("~")


def readable(value: Value, what: str) -> str:
    """The path of a file that a variable names. Raises ConfigError when it cannot be read."""
    path = os.path.expanduser(value.text)
    try:
        with open(path, "rb"):
            return path
    except OSError as error:
        raise ConfigError(
            f"{value.origin} names {path}, which cannot be read: {error.strerror}",
            expected=what,
            advice="Mount or create the file, or unset the variable",
        ) from None


def web_address(value: Value) -> str:
    """An endpoint with its scheme and no slash at its end. Raises ConfigError."""
    text = value.text if "://" in value.text else f"https://{value.text}"
    scheme, _, rest = text.partition("://")
    if scheme.lower() not in ("http", "https") or not _is_address(text):
        raise ConfigError(
            f"{value.origin} is no address: {rest.rpartition('@')[2].partition('?')[0]!a}",
            expected="an endpoint such as https://s3.example.com or http://10.0.0.5:9000",
        )
    if "@" in rest.partition("/")[0]:
        raise ConfigError(
            f"{value.origin} carries a user name",
            expected="an endpoint without credentials",
            advice="Pass keys by the cloud's own variables, such as AWS_ACCESS_KEY_ID",
        )
    return f"{scheme.lower()}://{rest.rstrip('/')}"


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises ValueError for one that is no number
    except ValueError:
        return False
    return bool(parts.hostname) and not re.search(r"[?#\s\x00-\x1f]", text)
