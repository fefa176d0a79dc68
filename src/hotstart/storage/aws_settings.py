"""Settings of S3 and of stores that speak its language."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from hotstart.errors import ConfigError
from hotstart.storage import aws_credentials
from hotstart.storage.aws_files import Profile, read_profile
from hotstart.storage.cloud_settings import CloudSettings
from hotstart.storage.location import Location
from hotstart.storage.variables import Value, first, option, readable, switch, web_address

_AWS_HOST = re.compile(r"s3[.-](?:fips[.-])?(?:dualstack\.)?([a-z]{2}-[a-z-]+-\d)\.amazonaws\.com(?:\.cn)?$")
_PLAIN_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
"""A bucket that can be part of a host's name and is covered by the certificate."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_OTHERS_ENDPOINTS = ("RUNAI_STREAMER_S3_ENDPOINT", "S3_ENDPOINT_URL")


def s3_settings(location: Location, environ: Mapping[str, str]) -> CloudSettings:
    """Endpoint, region, addressing and credentials of a bucket. Raises ConfigError."""
    profile = read_profile(environ)
    bucket = location.container
    custom, ignored = _endpoint(environ, profile)
    region = _region(location, environ, profile, custom)
    endpoint = custom.text or _aws_endpoint(environ, profile, region.text)
    _refuse_bucket_in_path(custom, bucket)
    style = _style(environ, profile, bucket, custom)
    credentials = aws_credentials.choose(environ, profile)
    express = bucket.endswith("--x-s3") and not custom

    with_bucket = f"{endpoint}/{bucket}" if style.path else _in_host(endpoint, bucket)
    config: dict[str, Any] = {
        "region": region.text,
        "virtual_hosted_style_request": not style.path,
        "skip_signature": credentials.unsigned,
        **credentials.config,
    }
    # Always given: obstore looks into the environment for what is not.
    if express:
        config["s3_express"] = True
    else:
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint if style.path else with_bucket
    payer = first(environ, "AWS_REQUEST_PAYER", "AWS_REQUESTER_PAYS")
    if payer.yes:
        config["request_payer"] = True

    provider = credentials.provider
    secure = endpoint.startswith("https://") or "role_arn" in config  # tokens go over https alone
    parts = [
        f"endpoint {custom or endpoint}",
        f"region {region}",
        f"{'path' if style.path else 'virtual-hosted'} style ({style.origin})",
        *(["requester pays"] if payer.yes else []),
        f"credentials: {credentials.source}",
        *ignored,
    ]
    return CloudSettings(
        described=", ".join(parts),
        advice=credentials.advice,
        endpoint=endpoint,
        base_url=with_bucket if credentials.unsigned and not express else "",
        signs=not express,
        config=config,
        client={"allow_http": True},  # roles are asked for at plain addresses, whatever the endpoint
        credential_provider=provider,
        expires=_expiry(provider),
        ca_file=_ca_file(environ, profile) if secure else "",
    )


def _expiry(provider: aws_credentials.Provider | None) -> Any:
    def expires() -> datetime | None:
        return provider.keys().expires_at if provider is not None else None

    return expires


def _endpoint(environ: Mapping[str, str], profile: Profile) -> tuple[Value, list[str]]:
    """The endpoint, falsy for AWS itself, and what contradicts it, for the log."""
    found = Value()
    if not switch(environ, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
        found = first(environ, *_ENDPOINTS) or profile.endpoint
    found = first(environ, option("s3_endpoint")) or found
    others = [value for name in _OTHERS_ENDPOINTS if (value := first(environ, name))]
    ignored: list[str] = []
    if not found and others:
        found = others[0]
    if found:
        found = Value(web_address(found), found.origin)
        ignored = [
            f"{other.origin} differs and is not used" for other in others if web_address(other) != found.text
        ]
    return found, ignored


def _region(location: Location, environ: Mapping[str, str], profile: Profile, endpoint: Value) -> Value:
    found = Value(location.region, "the address") if location.region else Value()
    host = urlsplit(endpoint.text).hostname or ""
    if not found and (named := _AWS_HOST.search(host)):
        found = Value(named[1], endpoint.origin)
    found = found or first(environ, "AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region")
    if found and not re.fullmatch(r"[\w-]{1,63}", found.text, re.ASCII):
        raise ConfigError(f"{found.origin} is no region: {found.text!a}", expected="a name such as eu-west-1")
    return found or Value("us-east-1", "nothing names it")


def _aws_endpoint(environ: Mapping[str, str], profile: Profile, region: str) -> str:
    def on(variable: str, key: str) -> bool:
        return bool(switch(environ, variable)) or (not environ.get(variable) and profile.get(key).yes)

    fips = "-fips" if on("AWS_USE_FIPS_ENDPOINT", "use_fips_endpoint") else ""
    dualstack = ".dualstack" if on("AWS_USE_DUALSTACK_ENDPOINT", "use_dualstack_endpoint") else ""
    return f"https://s3{fips}{dualstack}.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


def _refuse_bucket_in_path(endpoint: Value, bucket: str) -> None:
    if urlsplit(endpoint.text).path.rstrip("/").rpartition("/")[2] == bucket:
        raise ConfigError(
            f"The endpoint {endpoint} ends in the bucket's name",
            expected="the address of the store alone",
            advice=f"Set {endpoint.origin} to {endpoint.text.rpartition('/')[0]}",
        )


class _Style(Struct, frozen=True):
    path: bool
    origin: str


def _style(environ: Mapping[str, str], profile: Profile, bucket: str, endpoint: Value) -> _Style:
    """Path style: the bucket in the path. Virtual-hosted style: in the host's name."""
    style = _named_style(environ, profile, bucket, endpoint)
    if not style.path and _is_ip_address(urlsplit(endpoint.text).hostname or ""):
        return _Style(True, f"no name can stand before an IP address, whatever {style.origin} says")
    return style


def _named_style(environ: Mapping[str, str], profile: Profile, bucket: str, endpoint: Value) -> _Style:
    asked = first(environ, "AWS_S3_ADDRESSING_STYLE") or profile.s3("addressing_style")
    if asked and asked.text.lower() not in ("path", "virtual", "auto"):
        raise ConfigError(f"The addressing style is {asked}", expected="path, virtual or auto")
    if asked and asked.text.lower() != "auto":
        return _Style(asked.text.lower() == "path", asked.origin)
    for name in ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"):
        if value := first(environ, name):
            return _Style(not value.yes, name)
    if endpoint and (urlsplit(endpoint.text).hostname or "").startswith(f"{bucket.lower()}."):
        return _Style(False, "the endpoint begins with the bucket")
    if endpoint and not _AWS_HOST.search(urlsplit(endpoint.text).hostname or ""):
        return _Style(True, "as for every endpoint but AWS's")
    if not _PLAIN_BUCKET.fullmatch(bucket):
        return _Style(True, "the bucket's name has a dot or is no host name")
    return _Style(False, "AWS's own")


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _in_host(endpoint: str, bucket: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    return endpoint if rest.lower().startswith(f"{bucket.lower()}.") else f"{scheme}://{bucket}.{rest}"


def _ca_file(environ: Mapping[str, str], profile: Profile) -> str:
    bundle = first(environ, "AWS_CA_BUNDLE") or profile.get("ca_bundle")
    return readable(bundle, "certificates in PEM format") if bundle else ""
