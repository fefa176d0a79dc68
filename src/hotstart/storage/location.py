"""Locations that are no paths: ``s3://bucket/prefix`` and its relatives, in every spelling people use."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, quote, unquote, urlsplit

from msgspec import Struct

from hotstart.errors import ConfigError

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_ALIASES = {
    "s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "gcs": "gs",
    "az": "az", "azure": "az", "adl": "az", "abfs": "az", "abfss": "az", "wasb": "az", "wasbs": "az",
    "http": "http", "https": "https",
}  # fmt: skip
_CLOUDS = r"core\.windows\.net|core\.chinacloudapi\.cn|core\.usgovcloudapi\.net|fabric\.microsoft\.com"
_AZURE_HOST = re.compile(rf"([a-z0-9-]{{3,24}})\.(?:blob|dfs)\.({_CLOUDS})", re.IGNORECASE)
_S3_HOST = re.compile(
    r"(?:(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])\.)?s3(?:[.-](?:dualstack\.)?(?P<region>[a-z]{2}-[a-z-]+-\d))?"
    r"\.amazonaws\.com(?:\.cn)?",
    re.IGNORECASE,
)
_GCS_HOST = re.compile(
    r"(?:(?P<bucket>[a-z0-9][a-z0-9._-]{1,61}[a-z0-9])\.)?storage\.googleapis\.com", re.IGNORECASE
)
_HUB_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
_CONSOLES = re.compile(
    r"(?:[\w-]+\.)*console\.aws\.amazon\.com|console\.cloud\.google\.com|storage\.cloud\.google\.com|portal\.azure\.com",
    re.IGNORECASE,
)
_FILES = re.compile(
    r"(?:.*\.(?:safetensors|safetensors\.index\.json|gguf|bin|tar|tar\.gz|tgz|zip)|config\.json)",
    re.IGNORECASE,
)


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
    """Of a web address, such as a shared access signature; a secret."""
    region: str = ""
    """Of an address of S3 that names it."""
    domain: str = ""
    """Of an Azure account outside the public cloud: ``core.usgovcloudapi.net``."""

    def __str__(self) -> str:
        prefix = quoted(self.prefix) if self.is_web else self.prefix
        if self.account:
            host = f"{self.account}.dfs.{self.domain or 'core.windows.net'}"
            return f"abfss://{self.container}@{host}" + (f"/{prefix}" if prefix else "")
        return f"{self.scheme}://{self.container}" + (f"/{prefix}" if prefix else "")

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
    """Whether a model's name is the address of an object store or a web server; a page of the hub is not."""
    return scheme_of(text) in _ALIASES and not is_hub_page(text)


def is_hub_page(text: str) -> bool:
    """Whether it is an address of the Hugging Face hub, which stands for a name there."""
    return _host(text) in _HUB_HOSTS


def parse_location(text: str) -> Location:
    """Raises ConfigError that shows how such an address is written.

    Leading, trailing and double slashes, and ``.`` as a component, mean nothing.
    """
    scheme = _ALIASES.get(scheme_of(text), "")
    if not scheme or is_hub_page(text):
        raise ConfigError(
            f"{shown(text)} is no location of a model", expected="s3://, gs://, az:// or http(s)://"
        )
    location = _web(text, scheme) if scheme in ("http", "https") else _store(text, scheme)
    *parents, last = location.prefix.split("/")
    if _FILES.fullmatch(last):
        folder = str(Location(location.scheme, location.container, "/".join(parents), location.account))
        raise ConfigError(
            f"{shown(text)} is the address of a file",
            expected="the folder of a model, with config.json, tokenizer and weights in it",
            advice=f"Pass the folder: {folder}",
        )
    return location


def quoted(key: str) -> str:
    """A key as the path of a URL."""
    return quote(key, safe="/-_.~")


def shown(text: str) -> str:
    """A location as logs may have it: without a query, a user and a password."""
    scheme, separator, rest = text.partition("://")
    authority, slash, path = rest.partition("?")[0].partition("/")
    if _ALIASES.get(scheme.lower()) != "az":  # there it is the container
        authority = authority.rpartition("@")[2]
    open_part = f"{scheme}{separator}{authority}{slash}{path}"
    return open_part if open_part.isprintable() else ascii(open_part)


def _store(text: str, scheme: str) -> Location:
    rest = text.partition("://")[2]
    container, _, prefix = rest.lstrip("/").partition("/")
    account = domain = ""
    if scheme == "az":
        container, at, host = container.partition("@")  # container@account.dfs.core.windows.net
        azure = _AZURE_HOST.fullmatch(host if at else container)
        if azure:
            account, domain = azure[1].lower(), _domain(azure)
        elif at:
            account = host.partition(".")[0].lower()
        if azure and not at:  # account.blob.core.windows.net/container
            container, _, prefix = prefix.lstrip("/").partition("/")
    if not container or container in (".", ".."):
        raise ConfigError(
            f"{shown(text)} names no {'container' if scheme == 'az' else 'bucket'}",
            expected=f"{scheme}://BUCKET/PREFIX",
            advice="The part after :// is the bucket or container, what follows is the model's folder",
        )
    if (
        any(char in container for char in "?#@:\\ ")
        or any(ord(char) < 33 for char in container)
        or "?" in prefix
    ):
        raise ConfigError(
            f"{shown(text)} is not written as such an address is",
            expected=f"{scheme}://BUCKET/PREFIX, without a port, a user or a query",
            advice="Set the endpoint and the credentials by environment variables or files (docs/storage.md)",
        )
    return Location(scheme, container, _clean(text, prefix), account, domain=domain)


def _web(text: str, scheme: str) -> Location:
    parts = _split(text)
    if parts is None or not parts.hostname:
        raise ConfigError(f"{shown(text)} names no host", expected=f"{scheme}://HOST/FOLDER")
    if parts.username is not None:
        raise ConfigError(
            f"{scheme}://…@{parts.hostname} carries a user name",
            expected="an address without credentials",
            advice="Let the server allow this machine, or use an object store's own credentials",
        )
    if _CONSOLES.fullmatch(parts.hostname):
        raise ConfigError(
            f"{shown(text)} is a page of a cloud's console",
            expected="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX",
            advice="Pass the bucket and the folder that this page shows",
        )
    folder = _clean(text, unquote(parts.path))
    return _of_a_cloud(parts, folder) or Location(scheme, parts.netloc, folder, query=parts.query)


def _of_a_cloud(parts: SplitResult, folder: str) -> Location | None:
    """An address copied from a cloud's own pages: its store can list there, and may have credentials."""
    host = parts.hostname or ""
    container, _, prefix = folder.partition("/")
    if (azure := _AZURE_HOST.fullmatch(host)) and container:
        return Location("az", container, prefix, azure[1].lower(), parts.query, domain=_domain(azure))
    if parts.query:
        return None  # a signature that belongs to this address
    if s3 := _S3_HOST.fullmatch(host):
        region = (s3["region"] or "").lower()
        if s3["bucket"]:
            return Location("s3", s3["bucket"].lower(), folder, region=region)
        return Location("s3", container, prefix, region=region) if container else None
    if gcs := _GCS_HOST.fullmatch(host):
        if gcs["bucket"]:
            return Location("gs", gcs["bucket"].lower(), folder)
        return Location("gs", container, prefix) if container else None
    return None


def _domain(azure: re.Match[str]) -> str:
    domain = azure[2].lower()
    return "" if domain == "core.windows.net" else domain


def _split(text: str) -> SplitResult | None:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises ValueError for one that is no number
    except ValueError:
        return None
    return parts


def _host(text: str) -> str:
    if scheme_of(text) not in ("http", "https"):
        return ""
    parts = _split(text)
    return (parts.hostname or "") if parts else ""


def _clean(text: str, prefix: str) -> str:
    names = [name for name in prefix.split("/") if name not in ("", ".")]
    if ".." in names or any(ord(char) < 32 for char in prefix):
        raise ConfigError(f"{shown(text)!a} has a component that no key can have", expected="a plain prefix")
    return "/".join(names)
