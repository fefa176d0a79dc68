"""How a store is reached: endpoint, region, addressing and the source of credentials.

Environment variables and files are looked at in each cloud's own order; what was found is said in
one line, with the variable or file each setting came from, without a secret.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct

from hotstart.errors import ConfigError
from hotstart.storage.location import Location
from hotstart.storage.variables import first, readable


class CloudSettings(Struct, kw_only=True):
    """Resolved; nothing was asked over the network yet."""

    described: str
    """``endpoint http://… (AWS_ENDPOINT_URL), region us-east-1 (AWS_REGION), path style, credentials: …``."""
    advice: str = ""
    """What to check when the store refuses."""
    endpoint: str = ""
    """Without the bucket; empty: nobody names it."""
    base_url: str = ""
    """Where keys are asked for without a signature; empty: requests are signed, or see :attr:`signs`."""
    query: str = ""
    """Behind every address below ``base_url``, such as a shared access signature; a secret."""
    headers: dict[str, str] = {}
    """Of every request for an object."""
    signs: bool = True
    """Whether a key can be given an address that needs no more; if not, ``obstore`` reads."""
    config: dict[str, Any] = {}
    client: dict[str, Any] = {}
    credential_provider: Callable[[], Any] | None = None
    expires: Callable[[], datetime | None] = lambda: None
    """When the credentials of now end; None: unknown or never. Raises ConfigError and StorageError."""
    ca_file: str = ""

    def __repr__(self) -> str:
        return f"CloudSettings({self.described!r})"  # the rest holds secrets

    def tls(self) -> ssl.SSLContext | None:
        """The context of https connections; None: the system's default."""
        return ssl.create_default_context(cafile=self.ca_file) if self.ca_file else None

    def open(self, location: Location, *, patience: float = 60.0, retries: int = 6) -> Any:
        """The ``obstore`` store of the container. ``patience``: seconds of trying again.

        Without ``retries`` it is all the time that a request has.

        Raises ConfigError and StorageError for credentials that cannot be had.
        """
        from obstore import store

        self.expires()  # its errors are ours; what a provider raises inside obstore becomes text
        kinds: dict[str, Any] = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
        client = dict(self.client)
        if not retries:
            client |= {"timeout": f"{patience} seconds", "connect_timeout": f"{patience} seconds"}
        if self.ca_file:
            with open(self.ca_file, "rb") as file:
                client["root_certificate"] = file.read()
        return kinds[location.scheme](
            location.container,
            config=self.config,
            client_options=client,
            retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=patience)},
            credential_provider=self.credential_provider,
        )


def settings_for(location: Location, environ: Mapping[str, str]) -> CloudSettings:
    """The settings for a location. Raises ConfigError."""
    if location.scheme == "s3":
        from hotstart.storage.aws_settings import s3_settings as resolve
    elif location.scheme == "gs":
        from hotstart.storage.google_settings import gs_settings as resolve
    elif location.scheme == "az":
        from hotstart.storage.azure_settings import az_settings as resolve
    else:
        resolve = _web
    settings = resolve(location, environ)
    settings.described = " ".join(settings.described.split())  # one line, whatever a variable holds
    ca_file = first(environ, "SSL_CERT_FILE")
    if ca_file and not settings.ca_file and not settings.endpoint.startswith("http://"):
        settings.ca_file = readable(ca_file, "certificates in PEM format")
    if settings.ca_file:
        try:
            settings.tls()
        except (ssl.SSLError, ValueError):
            raise ConfigError(
                f"{settings.ca_file} holds no certificates", expected="certificates in PEM format"
            ) from None
    return settings


def _web(location: Location, environ: Mapping[str, str]) -> CloudSettings:
    base = f"{location.scheme}://{location.container}"
    return CloudSettings(described=f"web server {base}", endpoint=base, base_url=base, query=location.query)
