"""Settings of Azure Blob Storage.

In this order: 1. anonymous access, where a variable asks for it; 2. a shared access signature in the
address; 3. a connection string; 4. the account's key; 5. a shared access signature; 6. a token;
7. a service principal; 8. workload identity; 9. the machine's identity; 10. Azure's command line,
where a variable asks for it; 11. nothing was found: anonymous. An account's key signs without a
request, a shared access signature needs none; with other credentials ``obstore`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hotstart.errors import ConfigError
from hotstart.storage.cloud_settings import CloudSettings
from hotstart.storage.location import Location
from hotstart.storage.variables import Value, first, readable, switch, web_address

_VERSION = {"x-ms-version": "2023-11-03"}
"""Without it anonymous requests get the answers of 2009, whose ETags have no quotes."""
_EMULATOR = {
    "AccountName": "devstoreaccount1",
    # Published by Microsoft; every emulator has it.
    "AccountKey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "BlobEndpoint": "http://127.0.0.1:10000/devstoreaccount1",
}
_ASSET_TAG = "/sys/class/dmi/id/chassis_asset_tag"
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def az_settings(location: Location, environ: Mapping[str, str]) -> CloudSettings:
    """Account, endpoint and credentials of a container. Raises ConfigError."""
    connection, origin = _connection(environ)
    account = _account(location, environ, connection, origin)
    if location.account and connection.get("AccountName", location.account) != location.account:
        connection = {}  # of another account than the address names
    endpoint = _endpoint(location, environ, connection, account.text, origin)
    shown = f"account {account}, endpoint {endpoint}"

    def settings(source: str, advice: str = "", **fields: Any) -> CloudSettings:
        config = {"account_name": account.text, "endpoint": endpoint.text, **fields.pop("config", {})}
        return CloudSettings(
            described=f"{shown}, credentials: {source}",
            advice=advice,
            endpoint=endpoint.text,
            headers=_VERSION,
            config=config,
            client={"allow_http": True},
            **fields,
        )

    base_url = f"{endpoint.text}/{location.container}"
    if anonymous := switch(environ, "AZURE_SKIP_SIGNATURE"):
        config = {"skip_signature": True}
        return settings(f"none, anonymous ({anonymous.origin})", base_url=base_url, config=config)
    key = Value(connection.get("AccountKey", ""), origin) or first(
        environ, "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY"
    )
    sas = Value(connection.get("SharedAccessSignature", ""), origin) or first(
        environ, "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"
    )
    if location.query:
        key, sas = Value(), Value(location.query, "the address")
    if key:
        advice = f"Check that {key.origin} is the key of the account {account.text}"
        return settings(f"account key ({key.origin})", advice, config={"account_key": key.text})
    if sas:
        text = sas.text.lstrip("?")
        advice = f"Check that the signature of {sas.origin} has not expired and allows reading and listing"
        return settings(
            f"shared access signature ({sas.origin})",
            advice,
            base_url=base_url,
            query=text,
            config={"sas_key": text},
        )
    return _identity(environ, settings) or settings(
        "none found, anonymous",
        "No credentials were found: neither AZURE_STORAGE_ACCOUNT_KEY, nor AZURE_STORAGE_SAS_TOKEN, nor "
        "AZURE_CLIENT_ID with a secret or a federated token, nor a machine of Azure's. Set one of them",
        base_url=base_url,
        config={"skip_signature": True},
    )


def _identity(environ: Mapping[str, str], settings: Any) -> CloudSettings | None:
    """Credentials that are tokens: they cannot sign without asking Azure, so obstore reads."""
    role = "Give it the role Storage Blob Data Reader on the account or container"
    client = first(environ, "AZURE_CLIENT_ID", "AZURE_STORAGE_CLIENT_ID")
    tenant = first(environ, "AZURE_TENANT_ID", "AZURE_STORAGE_TENANT_ID")
    secret = first(environ, "AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET")
    federated = first(environ, "AZURE_FEDERATED_TOKEN_FILE")

    def reads(source: str, **config: Any) -> CloudSettings:
        given: CloudSettings = settings(f"{source}, read through obstore", role, signs=False, config=config)
        return given

    if token := first(environ, "AZURE_STORAGE_TOKEN"):
        return reads(f"token ({token.origin})", token=token.text)
    if secret or federated:
        if not (client and tenant):
            raise ConfigError(
                f"{(secret or federated).origin} is set and "
                f"{'AZURE_CLIENT_ID' if not client else 'AZURE_TENANT_ID'} is not",
                expected="AZURE_CLIENT_ID, AZURE_TENANT_ID and a secret or AZURE_FEDERATED_TOKEN_FILE",
                advice="Set what is absent, or unset all of them",
            )
        config = {"client_id": client.text, "tenant_id": tenant.text}
        if host := first(environ, "AZURE_AUTHORITY_HOST", "AZURE_STORAGE_AUTHORITY_HOST"):
            config["authority_host"] = host.text
        if secret:
            return reads(f"service principal {client}", **config, client_secret=secret.text)
        path = readable(federated, "a token file")
        return reads(f"workload identity {client}", **config, federated_token_file=path)
    machine = first(environ, "AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT", "IDENTITY_ENDPOINT")
    if machine or _on_azure():
        config = {"msi_endpoint": machine.text} if machine else {}
        if client:
            config["client_id"] = client.text
        return reads("identity of the machine" + (f" ({machine.origin})" if machine else ""), **config)
    if cli := switch(environ, "AZURE_USE_AZURE_CLI"):
        return reads(f"az account get-access-token ({cli.origin})", use_azure_cli=True)
    return None


def _connection(environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The parts of a connection string, and the variable it came from."""
    emulator = switch(environ, "AZURE_STORAGE_USE_EMULATOR")
    if emulator:
        address = first(environ, "AZURITE_BLOB_STORAGE_URL")
        blob = f"{web_address(address)}/devstoreaccount1" if address else _EMULATOR["BlobEndpoint"]
        return {**_EMULATOR, "BlobEndpoint": blob}, emulator.origin
    text = first(environ, "AZURE_STORAGE_CONNECTION_STRING")
    parts = dict(pair.partition("=")[::2] for pair in text.text.split(";") if pair.strip())
    parts = {key.strip(): value.strip() for key, value in parts.items()}
    if parts.get("UseDevelopmentStorage", "").lower() == "true":
        return _EMULATOR, text.origin
    if text and not parts.keys() & {"AccountName", "BlobEndpoint"}:
        raise ConfigError(
            f"{text.origin} is no connection string",
            expected="AccountName=…;AccountKey=…, as Azure's portal shows it",
        )
    return parts, text.origin


def _account(
    location: Location, environ: Mapping[str, str], connection: dict[str, str], origin: str
) -> Value:
    found = Value(location.account, "the address") if location.account else Value()
    if not found and connection.get("AccountName"):
        found = Value(connection["AccountName"], origin)
    found = found or first(environ, "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    if not found and connection.get("BlobEndpoint"):
        host = connection["BlobEndpoint"].partition("://")[2]
        found = Value(host.partition(".")[0], origin)
    if not found:
        raise ConfigError(
            f"{location} names no storage account",
            expected="AZURE_STORAGE_ACCOUNT_NAME, or an address with it",
            advice=f"Pass abfss://{location.container}@ACCOUNT.dfs.core.windows.net/{location.prefix}",
        )
    if not re.fullmatch(r"[a-z0-9-]{1,63}", found.text):
        raise ConfigError(
            f"{found.origin} is no storage account: {found.text!a}", expected="lower-case letters and digits"
        )
    return found


def _endpoint(
    location: Location, environ: Mapping[str, str], connection: dict[str, str], account: str, origin: str
) -> Value:
    if blob := connection.get("BlobEndpoint"):
        return Value(web_address(Value(blob, origin)), origin)
    if found := first(environ, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"):
        return Value(web_address(found), found.origin)
    if suffix := connection.get("EndpointSuffix"):
        scheme = connection.get("DefaultEndpointsProtocol", "https")
        return Value(f"{scheme}://{account}.blob.{suffix}", origin)
    return Value(f"https://{account}.blob.{location.domain or 'core.windows.net'}", "Azure's own")


def _on_azure() -> bool:
    try:
        with open(_ASSET_TAG, encoding="utf-8") as file:
            return _AZURE_TAG in file.read()
    except (OSError, UnicodeDecodeError):
        return False
