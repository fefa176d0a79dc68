"""Settings of Google Cloud Storage.

In Google's order: 1. an emulator or anonymous access, where a variable asks for it; 2. the file that
a variable names; 3. gcloud's application default credentials; 4. the machine's service account;
5. nothing was found: anonymous. Only the key of a service account signs without a request to
Google; with other credentials ``obstore`` reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from hotstart.errors import ConfigError
from hotstart.storage.cloud_settings import CloudSettings
from hotstart.storage.location import Location
from hotstart.storage.variables import Value, first, home, readable, switch, web_address

_ENDPOINT = "https://storage.googleapis.com"
_FILES = (
    "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_APPLICATION_CREDENTIALS",
    "RUNAI_STREAMER_GCS_CREDENTIAL_FILE",
)  # fmt: skip
_PRODUCT = "/sys/class/dmi/id/product_name"


def gs_settings(location: Location, environ: Mapping[str, str]) -> CloudSettings:
    """Endpoint and credentials of a bucket. Raises ConfigError."""
    emulator = first(environ, "STORAGE_EMULATOR_HOST", "CLOUD_STORAGE_EMULATOR_ENDPOINT", "GOOGLE_BASE_URL")
    endpoint = _ENDPOINT
    if emulator:
        plain = "://" not in emulator.text  # Google's libraries take HOST:PORT too
        endpoint = web_address(Value(f"http://{emulator.text}", emulator.origin) if plain else emulator)
    shown = f"endpoint {Value(endpoint, emulator.origin) if emulator else endpoint}"
    anonymous = switch(environ, "GOOGLE_SKIP_SIGNATURE", "RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS")
    if anonymous or (emulator and emulator.origin != "GOOGLE_BASE_URL"):
        return _anonymous(
            location, endpoint, f"{shown}, credentials: none ({(anonymous or emulator).origin})"
        )
    if text := environ.get("GOOGLE_SERVICE_ACCOUNT_KEY", "").strip():
        key = Value(text, "GOOGLE_SERVICE_ACCOUNT_KEY")
        return _with_key(_content(text, key.origin), key, endpoint, shown, inline=True)
    found = first(environ, *_FILES)
    if found:
        path = readable(found, "the JSON file of a service account or of gcloud")
    else:
        folder = environ.get("CLOUDSDK_CONFIG") or os.path.join(home(environ), ".config", "gcloud")
        path = os.path.join(folder, "application_default_credentials.json")
        found = Value(path, "gcloud auth application-default login") if os.path.isfile(path) else Value()
    if found:
        with open(path, encoding="utf-8", errors="replace") as file:
            content = _content(file.read(), path)
        return _with_key(content, Value(path, found.origin), endpoint, shown)
    machine = first(environ, "GCE_METADATA_HOST", "GCE_METADATA_IP")
    if machine or _on_google():
        return CloudSettings(
            described=f"{shown}, credentials: service account of the machine, read through obstore",
            advice="Give the machine's or pod's service account the role roles/storage.objectViewer",
            endpoint=endpoint,
            signs=False,
            config={"base_url": endpoint, "skip_signature": False},
            client={"allow_http": True},
        )
    return _anonymous(
        location,
        endpoint,
        f"{shown}, credentials: none found, anonymous",
        "No credentials were found: neither GOOGLE_APPLICATION_CREDENTIALS, nor "
        f"{path}, nor a machine of Google's. Set the variable, or run gcloud auth application-default login",
    )


def _anonymous(location: Location, endpoint: str, described: str, advice: str = "") -> CloudSettings:
    return CloudSettings(
        described=described,
        advice=advice,
        endpoint=endpoint,
        base_url=f"{endpoint}/{location.container}",
        config={"base_url": endpoint, "skip_signature": True},
        client={"allow_http": True},
    )


def _with_key(
    content: dict[str, Any], found: Value, endpoint: str, shown: str, *, inline: bool = False
) -> CloudSettings:
    kind = content.get("type", "")
    where = found.origin if inline else str(found)
    config: dict[str, Any] = {"base_url": endpoint, "skip_signature": False}
    if kind == "service_account" or content.get("private_key"):
        config["service_account_key" if inline else "service_account"] = found.text
        account = f"service account {content.get('client_email', '')} of {where}"
        return CloudSettings(
            described=f"{shown}, credentials: {account}",
            advice=f"Give the {account} the role roles/storage.objectViewer",
            endpoint=endpoint,
            config=config,
            client={"allow_http": True},
        )
    if kind == "authorized_user":
        config["application_credentials"] = found.text
        return CloudSettings(
            described=f"{shown}, credentials: a user's, of {where}, read through obstore: they cannot sign",
            advice="Check that this user may read the bucket; after a change of password log in again: "
            "gcloud auth application-default login",
            endpoint=endpoint,
            signs=False,
            config=config,
            client={"allow_http": True},
        )
    raise ConfigError(
        f"{where} holds credentials of the kind {kind!a}",
        expected="service_account or authorized_user",
        advice="Use the key of a service account, or on GKE the pod's own identity (unset the variable)",
    )


def _content(text: str, origin: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{origin} is no JSON object", expected="credentials as Google's console gives them"
        )
    return content


def _on_google() -> bool:
    try:
        with open(_PRODUCT, encoding="utf-8") as file:
            return "Google" in file.read()
    except (OSError, UnicodeDecodeError):
        return False
