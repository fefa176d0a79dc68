"""How a store is reached: endpoint, region, addressing and the source of credentials.

Environment variables and files are looked at in each cloud's own order; what was found is said in
one line, without a secret.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from hotstart.storage.location import Location


class CloudSettings(Struct, kw_only=True):
    """Resolved; nothing was asked over the network yet."""

    described: str
    """``endpoint http://…, region us-east-1, path style, credentials: environment``."""
    advice: str = ""
    """What to check when the store refuses."""
    base_url: str = ""
    """Where keys are asked for without a signature; empty: requests are signed."""
    config: dict[str, Any] = {}
    client: dict[str, Any] = {}
    ca_file: str = ""

    def tls(self) -> ssl.SSLContext | None:
        """The context of https connections; None: the system's default."""
        return ssl.create_default_context(cafile=self.ca_file) if self.ca_file else None

    def open(self, location: Location) -> Any:
        """The ``obstore`` store of the container."""
        from obstore import store

        kinds: dict[str, Any] = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
        return kinds[location.scheme](location.container, config=self.config, client_options=self.client)


def settings_for(location: Location, environ: Mapping[str, str]) -> CloudSettings:
    """The settings for a location. Raises ConfigError."""
    if location.is_web:
        base = f"{location.scheme}://{location.container}"
        return CloudSettings(described=f"web server {base}", base_url=base)
    if location.scheme == "s3":
        return _s3(location, environ)
    return CloudSettings(described=location.scheme)


def _s3(location: Location, environ: Mapping[str, str]) -> CloudSettings:
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    config: dict[str, Any] = {"region": region}
    client: dict[str, Any] = {}
    if endpoint:
        config["endpoint"] = endpoint
        config["virtual_hosted_style_request"] = False
        client["allow_http"] = endpoint.startswith("http://")
    style = "path style" if endpoint else "virtual-hosted style"
    unsigned = environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes")
    if unsigned:
        config["skip_signature"] = True
    source = "none (unsigned)" if unsigned else "environment"
    return CloudSettings(
        described=f"endpoint {endpoint or 'of AWS'}, region {region}, {style}, credentials: {source}",
        base_url=f"{endpoint.rstrip('/')}/{location.container}" if unsigned and endpoint else "",
        config=config,
        client=client,
    )
