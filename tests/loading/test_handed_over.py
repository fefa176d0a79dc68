"""One set of variables for every loader: what the checks have used is what Run:ai's library is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotstart.errors import ConfigError
from hotstart.loading.streams.handed_over import Handed, for_runai, secrets_of
from hotstart.storage.cloud_settings import settings_for
from hotstart.storage.location import parse_location

KEYS = {"AWS_ACCESS_KEY_ID": "AKIAKEY", "AWS_SECRET_ACCESS_KEY": "hush-hush", "HOME": "/proc/nowhere"}
NO_ROLE = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": "/proc/nowhere"}
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "acct"}


def handed(address: str, environ: dict[str, str]) -> Handed:
    location = parse_location(address)
    return for_runai(location, settings_for(location, environ))


def test_keys_region_and_endpoint_of_a_store_that_speaks_s3() -> None:
    environ = KEYS | {"AWS_ENDPOINT_URL": "http://minio:9000", "AWS_REGION": "eu-west-2"}
    told = handed("s3://models/llama", environ)
    assert told.s3 == {
        "region_name": "eu-west-2",
        "endpoint": "http://minio:9000",
        "access_key_id": "AKIAKEY",
        "secret_access_key": "hush-hush",
        "session_token": None,
    }
    assert told.variables == {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    assert told.defaults == {"AWS_EC2_METADATA_DISABLED": "true"}


def test_the_endpoint_of_aws_itself_is_the_librarys_own_affair() -> None:
    told = handed("s3://models/llama", KEYS | {"AWS_REGION": "eu-west-2"})
    assert told.s3 is not None
    assert "endpoint" not in told.s3
    assert told.variables == {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "1"}


def test_keys_in_tensorizers_variables_serve_run_ai_too() -> None:
    environ = NO_ROLE | {
        "S3_ACCESS_KEY_ID": "K1",
        "S3_SECRET_ACCESS_KEY": "S1",
        "S3_ENDPOINT_URL": "http://h:1",
    }
    told = handed("s3://models/llama", environ).s3
    assert told is not None
    assert (told["access_key_id"], told["secret_access_key"], told["endpoint"]) == ("K1", "S1", "http://h:1")


def test_without_credentials_nothing_is_signed() -> None:
    told = handed("s3://models/llama", NO_ROLE)
    assert told.variables["RUNAI_STREAMER_S3_UNSIGNED"] == "1"


def test_a_role_is_asked_for_by_the_library_in_the_same_variables(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    environ = {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/r",
        "HOME": "/x",
    }
    told = handed("s3://models/llama", environ)
    assert told.s3 == {"region_name": "us-east-1"}
    assert told.defaults == {}


def test_the_authorities_of_a_store_are_handed_over(tmp_path: Path) -> None:
    import trustme

    bundle = tmp_path / "ca.pem"
    bundle.write_bytes(trustme.CA().cert_pem.bytes())
    environ = KEYS | {"AWS_ENDPOINT_URL": "https://minio:9000", "AWS_CA_BUNDLE": str(bundle)}
    assert handed("s3://models/llama", environ).variables["AWS_CA_BUNDLE"] == str(bundle)


def test_a_directory_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"S3 Express.*Leave --load-format out"):
        handed("s3://models--use1-az4--x-s3/llama", KEYS)


def test_an_emulator_of_google_is_asked_without_credentials() -> None:
    told = handed("gs://models/llama", {"STORAGE_EMULATOR_HOST": "localhost:9023"})
    assert told.variables == {
        "CLOUD_STORAGE_EMULATOR_ENDPOINT": "http://localhost:9023",
        "RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS": "true",
    }


def test_the_file_of_a_service_account_is_named(tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    key.write_text(json.dumps({"type": "service_account", "private_key": "p", "client_email": "a@b"}))
    told = handed("gs://models/llama", {"GOOGLE_SERVICE_ACCOUNT": str(key)})
    assert told.variables["GOOGLE_APPLICATION_CREDENTIALS"] == str(key)


def test_a_key_that_is_no_file_is_refused() -> None:
    key = json.dumps({"type": "service_account", "private_key": "p", "client_email": "a@b"})
    with pytest.raises(ConfigError, match="reads keys from files only"):
        handed("gs://models/llama", {"GOOGLE_SERVICE_ACCOUNT_KEY": key})


def test_the_key_of_an_azure_account() -> None:
    told = handed("az://models/llama", AZURE | {"AZURE_STORAGE_KEY": "c2VjcmV0"})
    assert told.variables == {
        "AZURE_STORAGE_ACCOUNT_NAME": "acct",
        "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0",
        "AZURE_STORAGE_ENDPOINT_SUFFIX": "blob.core.windows.net",
    }


def test_an_emulator_of_azure_becomes_a_connection_string() -> None:
    environ = AZURE | {
        "AZURE_STORAGE_KEY": "c2VjcmV0",
        "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:10000/acct",
    }
    assert handed("az://models/llama", environ).variables == {
        "AZURE_STORAGE_CONNECTION_STRING": "AccountName=acct;AccountKey=c2VjcmV0;"
        "BlobEndpoint=http://127.0.0.1:10000/acct"
    }


@pytest.mark.parametrize("name", ["AZURE_SKIP_SIGNATURE", "AZURE_STORAGE_TOKEN"])
def test_credentials_of_azure_that_the_library_does_not_know_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read az://models/llama with these credentials") as caught:
        handed("az://models/llama", AZURE | {name: "1"})
    assert "leave --load-format out" in caught.value.advice.lower()


@pytest.mark.parametrize(
    ("address", "environ"),
    [
        ("s3://models/llama", KEYS),
        ("az://models/llama", AZURE | {"AZURE_STORAGE_KEY": "aHVzaC1odXNo"}),
        ("az://models/llama", AZURE | {"AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=hush-hush"}),
    ],
)
def test_what_is_secret_is_known_and_never_shown(address: str, environ: dict[str, str]) -> None:
    location = parse_location(address)
    settings = settings_for(location, environ)
    secrets = secrets_of(settings)
    assert any("hush" in secret or secret == "aHVzaC1odXNo" for secret in secrets)
    shown = repr(for_runai(location, settings)) + settings.described
    assert not any(secret in shown for secret in secrets if "hush" in secret or "aHVz" in secret)
