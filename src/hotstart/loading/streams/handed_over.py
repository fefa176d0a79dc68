"""The settings of a store in other libraries' words: one set of variables serves every loader.

What :mod:`hotstart.storage.cloud_settings` has resolved is handed over as it is, so that a library asks
the same endpoint with the same credentials as the checks before it. Roles of machines, pods and
applications are not resolved there; each cloud's own library asks for them again, in the same variables.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from msgspec import Struct

from hotstart.errors import ConfigError
from hotstart.storage.cloud_settings import CloudSettings
from hotstart.storage.location import Location

_PLAIN = frozenset(
    {
        "region", "endpoint", "aws_endpoint_url_s3", "base_url", "account_name", "tenant_id", "client_id",
        "authority_host", "msi_endpoint", "role_arn", "role_session_name", "endpoint_url_sts",
        "metadata_endpoint", "service_account", "application_credentials", "web_identity_token_file",
        "federated_token_file", "container_authorization_token_file", "container_credentials_full_uri",
        "container_credentials_relative_uri",
    }
)  # fmt: skip
"""Names of settings whose values may be shown."""
_OTHERWISE = "leave --load-format out: hotstart's own reader takes these credentials"


class Handed(Struct, frozen=True):
    """What Run:ai's library is told. Secret."""

    variables: dict[str, str]
    """Of the environment; they replace what is there."""
    defaults: dict[str, str] = {}
    """Of the environment, where the user has set nothing."""
    s3: dict[str, str | None] | None = None
    """Arguments of its ``S3Credentials``."""

    def __repr__(self) -> str:
        return f"Handed({', '.join({**self.variables, **self.defaults})})"


def for_runai(location: Location, settings: CloudSettings) -> Handed:
    """See the module. Raises ConfigError for credentials that the library cannot take."""
    return {"s3": _s3, "gs": _gs, "az": _az}[location.scheme](location, settings)


def secrets_of(settings: CloudSettings) -> list[str]:
    """Every text that no log and no error may have, the longest first."""
    found = [
        settings.query,
        *(v for k, v in settings.config.items() if isinstance(v, str) and k not in _PLAIN),
    ]
    if settings.credential_provider is not None:
        with suppress(Exception):  # keys that cannot be had now are in no message either
            given: dict[str, Any] = settings.credential_provider()
            found += [str(value) for value in given.values() if isinstance(value, str)]
    return sorted((text for text in found if len(text) > 3), key=len, reverse=True)


def _s3(location: Location, settings: CloudSettings) -> Handed:
    config = settings.config
    if config.get("s3_express"):
        raise ConfigError(
            f"{location} is a directory bucket (S3 Express), whose sessions the library does not open here",
            expected="an ordinary bucket",
            advice=_OTHERWISE,
        )
    region = str(config.get("region", ""))
    custom = settings.endpoint != f"https://s3.{region}.amazonaws.com"
    virtual = config.get("virtual_hosted_style_request")
    variables = {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "1" if virtual else "0"}
    if settings.ca_file:
        variables["AWS_CA_BUNDLE"] = settings.ca_file
    defaults: dict[str, str] = {}
    credentials: dict[str, str | None] = {"region_name": region or None}
    if custom:
        credentials["endpoint"] = settings.endpoint
    if config.get("skip_signature"):
        variables["RUNAI_STREAMER_S3_UNSIGNED"] = "1"
    elif settings.credential_provider is not None:
        keys = settings.credential_provider()
        credentials |= {
            "access_key_id": keys["access_key_id"],
            "secret_access_key": keys["secret_access_key"],
            "session_token": keys["token"],
        }
        # Else the library asks for a role of the machine first, and waits for seconds where there is none.
        defaults["AWS_EC2_METADATA_DISABLED"] = "true"
    return Handed(variables, defaults, credentials)


def _gs(location: Location, settings: CloudSettings) -> Handed:
    config = settings.config
    variables: dict[str, str] = {}
    if settings.endpoint != "https://storage.googleapis.com":
        variables["CLOUD_STORAGE_EMULATOR_ENDPOINT"] = settings.endpoint
    if config.get("skip_signature"):
        variables["RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS"] = "true"
    elif path := config.get("service_account") or config.get("application_credentials"):
        variables["RUNAI_STREAMER_GCS_CREDENTIAL_FILE"] = path
        variables["GOOGLE_APPLICATION_CREDENTIALS"] = path
    elif config.get("service_account_key"):
        raise ConfigError(
            "GOOGLE_SERVICE_ACCOUNT_KEY holds a key, and Run:ai's library reads keys from files only",
            expected="GOOGLE_APPLICATION_CREDENTIALS with the path of a file",
            advice=f"Write the key to a file that only this user can read, or {_OTHERWISE}",
        )
    return Handed(variables)


def _az(location: Location, settings: CloudSettings) -> Handed:
    config = settings.config
    if config.get("skip_signature") or config.get("token") or config.get("use_azure_cli"):
        raise ConfigError(
            f"Run:ai's library cannot read {location} with these credentials: {settings.described}",
            expected="an account's key, a shared access signature, or an identity of Azure's",
            advice=_OTHERWISE,
        )
    account, endpoint = config["account_name"], config["endpoint"]
    secret = ""
    variables = {"AZURE_STORAGE_ACCOUNT_NAME": account}
    if key := config.get("account_key"):
        variables["AZURE_STORAGE_ACCOUNT_KEY"] = key
        secret = f"AccountKey={key}"
    elif sas := config.get("sas_key"):
        variables["AZURE_STORAGE_SAS_TOKEN"] = sas
        secret = f"SharedAccessSignature={sas}"
    own = f"https://{account}."
    if endpoint.startswith(own):
        variables["AZURE_STORAGE_ENDPOINT_SUFFIX"] = endpoint.removeprefix(own)
    elif secret:
        text = f"AccountName={account};{secret};BlobEndpoint={endpoint}"
        variables = {"AZURE_STORAGE_CONNECTION_STRING": text}
    else:
        raise ConfigError(
            f"Run:ai's library cannot use an identity at the endpoint {endpoint}",
            expected="a connection string, or the account's own endpoint",
            advice=_OTHERWISE,
        )
    return Handed(variables)
