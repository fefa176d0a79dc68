"""Locations that are no paths: ``s3://bucket/prefix`` and its relatives, in every spelling people use."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct

from hotstart.errors import ConfigError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_ALIASES = {
    "s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "gcs": "gs",
    "az": "az", "azure": "az", "abfs": "az", "abfss": "az", "wasb": "az", "wasbs": "az",
    "http": "http", "https": "https",
}  # fmt: skip
_AZURE_HOST = re.compile(r"([a-z0-9]{3,24})\.(?:blob|dfs)\.core\.windows\.net", re.IGNORECASE)


class Location(Struct, frozen=True):
    """A prefix of an object store, or a folder of a web server."""

    scheme: str
    """``s3``, ``gs``, ``az``, ``http`` or ``https``."""
    container: str
    """The bucket or container; of a web server host and port."""
    prefix: str
    """Key of the folder, without slashes at its ends; empty: the container's root."""
    account: str = ""
    """Azure's storage account, where the location names it."""
    query: str = ""
    """Of a web server's address, such as a shared access signature; a secret."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.container}" + (f"/{self.prefix}" if self.prefix else "")

    def key(self, name: str) -> str:
        """The key of a file in the folder."""
        return f"{self.prefix}/{name}" if self.prefix else name

    @property
    def is_web(self) -> bool:
        """Whether it is a plain web server, which can neither list nor sign."""
        return self.scheme in ("http", "https")


def scheme_of(text: str) -> str:
    """``s3`` of ``S3://…``; empty for what is no URL."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


def is_location(text: str) -> bool:
    """Whether a model's name is the address of an object store or a web server."""
    return scheme_of(text) in _ALIASES


def parse_location(text: str) -> Location:
    """Raises ConfigError that shows how such an address is written.

    Leading, trailing and double slashes, and ``.`` as a component, mean nothing.
    """
    scheme = scheme_of(text)
    if scheme not in _ALIASES:
        raise ConfigError(f"{text} is no location of a model", expected="s3://, gs://, az:// or http(s)://")
    rest = text[len(scheme) + 3 :]
    scheme = _ALIASES[scheme]
    if scheme in ("http", "https"):
        return _web(text, scheme)
    container, _, prefix = rest.lstrip("/").partition("/")
    account = ""
    if scheme == "az" and "@" in container:  # container@account.dfs.core.windows.net
        container, _, host = container.partition("@")
        account = host.partition(".")[0]
    if not container:
        raise ConfigError(
            f"{text} names no bucket",
            expected=f"{scheme}://BUCKET/PREFIX",
            advice="The part after :// is the bucket or container, what follows is the model's folder",
        )
    if any(char in container for char in "?#") or "?" in prefix:
        raise ConfigError(
            f"{text.partition('?')[0]} is followed by a query",
            expected=f"{scheme}://BUCKET/PREFIX",
            advice="Pass credentials by environment variables or files, not in the location",
        )
    return Location(scheme, container, _clean(text, prefix), account)


def _web(text: str, scheme: str) -> Location:
    parts = urlsplit(text)
    if not parts.hostname:
        raise ConfigError(f"{text} names no host", expected=f"{scheme}://HOST/FOLDER")
    if parts.username is not None:
        raise ConfigError(
            f"{scheme}://…@{parts.hostname} carries a user name",
            expected="an address without credentials",
            advice="Let the server allow this machine, or use an object store's own credentials",
        )
    folder = _clean(text, unquote(parts.path))
    azure = _AZURE_HOST.fullmatch(parts.hostname)
    if azure and not parts.query and folder:
        container, _, prefix = folder.partition("/")
        return Location("az", container, prefix, azure[1].lower())
    return Location(scheme, parts.netloc, folder, query=parts.query)


def _clean(text: str, prefix: str) -> str:
    names = [name for name in prefix.split("/") if name not in ("", ".")]
    if ".." in names or any(ord(char) < 32 for char in prefix):
        raise ConfigError(f"{text!a} has a component that no key can have", expected="a plain prefix")
    return "/".join(names)


def quoted(key: str) -> str:
    """A key as the path of a URL."""
    return quote(key, safe="/-_.~")
