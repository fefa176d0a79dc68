"""How a store is reached: which variable or file decides, and what is said of contradictions."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotstart.errors import ConfigError, StorageError
from hotstart.storage.cloud_settings import CloudSettings, settings_for
from hotstart.storage.location import parse_location

KEYS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "hush"}
NO_ROLE = {"AWS_EC2_METADATA_DISABLED": "true"}
GS = "gs://bucket/model"
AZ = "abfss://c@acc.dfs.core.windows.net/model"


class Home:
    """A home directory with AWS's and Google's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environ = {"HOME": str(path), **NO_ROLE}

    def write(self, name: str, text: str) -> str:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(file)

    def settings(self, location: str = "s3://bucket/model", **environ: str) -> CloudSettings:
        return settings_for(parse_location(location), {**self.environ, **environ})


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def keys_of(settings: CloudSettings) -> tuple[str, str, str | None]:
    assert settings.credential_provider is not None
    keys: dict[str, Any] = settings.credential_provider()
    return keys["access_key_id"], keys["secret_access_key"], keys["token"]


def test_amazon_itself_with_keys_of_the_environment(home: Home) -> None:
    settings = home.settings(**KEYS, AWS_REGION="eu-west-1")
    assert settings.described == (
        "endpoint https://s3.eu-west-1.amazonaws.com, region eu-west-1 (AWS_REGION), "
        "virtual-hosted style (AWS's own), credentials: keys of AWS_ACCESS_KEY_ID"
    )
    assert settings.config["endpoint"] == "https://bucket.s3.eu-west-1.amazonaws.com"
    assert keys_of(settings) == ("AKID", "hush", None)


def test_another_endpoint_is_spoken_to_in_path_style(home: Home) -> None:
    settings = home.settings(**KEYS, AWS_ENDPOINT_URL="http://10.0.0.5:9000/")
    assert "endpoint http://10.0.0.5:9000 (AWS_ENDPOINT_URL)" in settings.described
    assert "region us-east-1 (nothing names it), path style" in settings.described
    assert settings.config["endpoint"] == "http://10.0.0.5:9000"


ENDPOINTS = [
    ("AWS_ENDPOINT_URL_S3", "http://a"),
    ("AWS_ENDPOINT_URL", "http://b"),
    ("RUNAI_STREAMER_S3_ENDPOINT", "http://c"),
    ("S3_ENDPOINT_URL", "d"),
]


@given(st.sets(st.sampled_from(range(4)), min_size=1))
def test_the_first_endpoint_in_order_wins_and_others_that_differ_are_named(chosen: set[int]) -> None:
    environ = dict(ENDPOINTS[index] for index in chosen)
    settings = settings_for(parse_location("s3://bucket"), {"HOME": "/nonexistent", **NO_ROLE, **environ})
    winner = ENDPOINTS[min(chosen)]
    address = winner[1] if "://" in winner[1] else f"https://{winner[1]}"
    assert settings.described.startswith(f"endpoint {address} ({winner[0]}),")
    for index in chosen - {min(chosen)}:
        name = ENDPOINTS[index][0]
        assert (f"{name} differs and is not used" in settings.described) == (not name.startswith("AWS_"))


@pytest.mark.parametrize(
    ("bucket", "environ", "expected"),
    [
        ("bucket", {}, "https://bucket.s3.us-east-1.amazonaws.com"),
        ("my.bucket", {}, "https://s3.us-east-1.amazonaws.com/my.bucket"),
        ("Old_Bucket", {}, "https://s3.us-east-1.amazonaws.com/Old_Bucket"),
        ("bucket", {"AWS_S3_ADDRESSING_STYLE": "path"}, "https://s3.us-east-1.amazonaws.com/bucket"),
        ("bucket", {"AWS_ENDPOINT_URL": "https://x.io"}, "https://x.io/bucket"),
        ("bucket", {"AWS_ENDPOINT_URL": "https://bucket.x.io"}, "https://bucket.x.io"),
        (
            "bucket",
            {"AWS_ENDPOINT_URL": "https://x.io", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
            "https://bucket.x.io",
        ),
        (
            "bucket",
            {"AWS_ENDPOINT_URL": "https://x.io", "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "1"},
            "https://bucket.x.io",
        ),
        (
            "bucket",
            {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"},
            "https://s3.us-east-1.amazonaws.com/bucket",
        ),
        ("bucket", {"AWS_REGION": "cn-north-1"}, "https://bucket.s3.cn-north-1.amazonaws.com.cn"),
        (
            "bucket",
            {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "https://bucket.s3.dualstack.us-east-1.amazonaws.com",
        ),
        ("bucket", {"AWS_USE_FIPS_ENDPOINT": "1"}, "https://bucket.s3-fips.us-east-1.amazonaws.com"),
    ],
)
def test_where_unsigned_objects_are_asked_for(
    home: Home, bucket: str, environ: Mapping[str, str], expected: str
) -> None:
    settings = home.settings(f"s3://{bucket}", AWS_NO_SIGN_REQUEST="1", **environ)
    assert settings.base_url == expected
    assert "credentials: none, unsigned (AWS_NO_SIGN_REQUEST)" in settings.described


def test_the_region_of_an_address_or_an_endpoint_goes_before_the_variable(home: Home) -> None:
    of_address = home.settings("https://bucket.s3.eu-west-1.amazonaws.com/m", AWS_REGION="us-east-2")
    of_endpoint = home.settings(
        AWS_ENDPOINT_URL="https://s3.ap-south-1.amazonaws.com", AWS_REGION="us-east-2"
    )
    assert "region eu-west-1 (the address)" in of_address.described
    assert "region ap-south-1 (AWS_ENDPOINT_URL), virtual-hosted style" in of_endpoint.described


CONFIG = """
[default]
region = eu-north-1
[profile store]
region = eu-central-1
s3 =
    addressing_style = virtual
services = private
[services private]
s3 =
    endpoint_url = https://s3.store.example
[profile sso]
sso_session = company
[profile role]
role_arn = arn:aws:iam::1:role/x
source_profile = default
"""
CREDENTIALS = """
[default]
aws_access_key_id = AKDEFAULT
aws_secret_access_key = hush
[store]
aws_access_key_id = AKSTORE
aws_secret_access_key = hush
aws_session_token = token
"""


@pytest.fixture
def profiles(home: Home) -> Home:
    home.write(".aws/config", CONFIG)
    home.write(".aws/credentials", CREDENTIALS)
    return home


def test_the_default_profile_is_found_by_itself(profiles: Home) -> None:
    settings = profiles.settings()
    assert keys_of(settings) == ("AKDEFAULT", "hush", None)
    assert f"credentials: keys of profile default in {profiles.path}/.aws/credentials" in settings.described
    assert "region eu-north-1 (profile default" in settings.described


def test_a_profile_gives_keys_region_style_and_the_endpoint_of_its_services(profiles: Home) -> None:
    settings = profiles.settings(AWS_PROFILE="store")
    assert keys_of(settings) == ("AKSTORE", "hush", "token")
    assert settings.config["endpoint"] == "https://bucket.s3.store.example"
    assert "region eu-central-1" in settings.described
    assert "services section of profile store" in settings.described


def test_keys_of_the_environment_go_before_a_profile_and_it_is_said(profiles: Home) -> None:
    settings = profiles.settings(**KEYS, AWS_PROFILE="store")
    assert keys_of(settings)[0] == "AKID"
    assert "(they go before AWS_PROFILE=store)" in settings.described


def test_an_absent_profile_is_told_with_those_that_exist(profiles: Home) -> None:
    with pytest.raises(ConfigError, match=r"profile stoer.*one of default, role, sso, store"):
        profiles.settings(AWS_PROFILE="stoer")


@pytest.mark.parametrize("name", ["sso", "role"])
def test_profiles_that_need_a_service_come_with_the_command_that_asks_it(profiles: Home, name: str) -> None:
    with pytest.raises(ConfigError, match=f"export-credentials --profile {name} --format env"):
        profiles.settings(AWS_PROFILE=name)


def test_variables_name_the_files(home: Home) -> None:
    path = home.write("elsewhere", CREDENTIALS)
    settings = home.settings(AWS_SHARED_CREDENTIALS_FILE=path)
    assert f"keys of profile default in {path}" in settings.described


def test_a_file_of_another_form_is_named_with_its_line(home: Home) -> None:
    home.write(".aws/credentials", "aws_access_key_id = x\n")
    with pytest.raises(ConfigError, match=r"credentials, line 1 is not in the format"):
        home.settings()


def process(home: Home, answer: object, code: int = 0) -> Home:
    script = home.write("give.py", f"import sys\nprint({json.dumps(answer)!r})\nsys.exit({code})\n")
    home.write(".aws/config", f"[default]\ncredential_process = {sys.executable} '{script}'\n")
    return home


def test_credential_process_gives_keys(home: Home) -> None:
    answer = {"Version": 1, "AccessKeyId": "AK", "SecretAccessKey": "hush", "SessionToken": "token"}
    settings = process(home, answer).settings()
    assert keys_of(settings) == ("AK", "hush", "token")
    assert "credentials: credential_process of profile default" in settings.described


def test_credential_process_is_asked_again_when_its_keys_are_about_to_expire(home: Home) -> None:
    answer = {
        "Version": 1,
        "AccessKeyId": "old",
        "SecretAccessKey": "hush",
        "Expiration": "2020-01-01T00:00:00Z",
    }
    settings = process(home, answer).settings()
    assert keys_of(settings)[0] == "old"
    process(home, {**answer, "AccessKeyId": "new"})
    assert keys_of(settings)[0] == "new"


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ([], 0, "no JSON of the expected form"),
        ({}, 3, "ended with 3"),
        ({"Version": 2}, 0, "gave no version 1"),
    ],
)
def test_credential_process_that_fails_is_named(home: Home, answer: object, code: int, said: str) -> None:
    settings = process(home, answer, code).settings()
    with pytest.raises(StorageError, match=said):
        settings.open(parse_location("s3://bucket"))


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"AWS_ACCESS_KEY_ID": "AKID"}, "AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not"),
        ({"AWS_SECRET_ACCESS_KEY": "hush"}, "AWS_SECRET_ACCESS_KEY is set and AWS_ACCESS_KEY_ID is not"),
        ({"S3_ACCESS_KEY_ID": "AKID"}, "S3_SECRET_ACCESS_KEY is not"),
        (
            {"AWS_WEB_IDENTITY_TOKEN_FILE": "/nonexistent", "AWS_ROLE_ARN": "r"},
            "cannot be read: No such file",
        ),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/dev/null"}, "no role to assume"),
        (
            {
                "AWS_WEB_IDENTITY_TOKEN_FILE": "/dev/null",
                "AWS_ROLE_ARN": "r",
                "AWS_ENDPOINT_URL_STS": "http://sts",
            },
            "has no encryption",
        ),
        ({"AWS_ENDPOINT_URL": "ftp://x"}, "is no address"),
        ({"AWS_ENDPOINT_URL": "http://u:hush@x"}, "carries a user name"),
        ({"AWS_ENDPOINT_URL": "http://x/bucket"}, "Set AWS_ENDPOINT_URL to http://x"),
        ({"AWS_S3_ADDRESSING_STYLE": "paths"}, "path, virtual or auto"),
        ({"AWS_CA_BUNDLE": "/nonexistent/ca.pem"}, "AWS_CA_BUNDLE names /nonexistent/ca.pem"),
        ({"SSL_CERT_FILE": "/dev/null"}, "holds no certificates"),
        (
            {**KEYS, "AWS_SESSION_TOKEN": "hush", "AWS_CREDENTIAL_EXPIRATION": "2020-01-01T00:00:00Z"},
            "expired at 2020-01-01",
        ),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://x"}, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE is not"),
    ],
)
def test_what_cannot_work_is_an_error_before_any_request(
    home: Home, environ: Mapping[str, str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        home.settings(**environ)
    assert said in str(caught.value)
    assert "hush" not in str(caught.value)


def test_web_identity_is_used_though_the_metadata_service_is_off(home: Home) -> None:
    token = home.write("token", "hush")
    settings = home.settings(AWS_WEB_IDENTITY_TOKEN_FILE=token, AWS_ROLE_ARN="arn:aws:iam::1:role/reader")
    assert "credentials: web identity, role arn:aws:iam::1:role/reader" in settings.described
    assert settings.config["web_identity_token_file"] == token


def test_role_of_the_container_then_of_the_machine(home: Home) -> None:
    machine = {"AWS_EC2_METADATA_DISABLED": "", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"}
    container = home.settings(AWS_CONTAINER_CREDENTIALS_RELATIVE_URI="/x", **machine)
    assert "role of the container (AWS_CONTAINER_CREDENTIALS_RELATIVE_URI)" in container.described
    assert "role of the machine (AWS_EC2_METADATA_SERVICE_ENDPOINT)" in home.settings(**machine).described


@pytest.mark.parametrize(
    ("location", "module", "name", "content", "said"),
    [
        ("s3://bucket", "aws_credentials", "_VENDOR", "Amazon EC2\n", "role of the machine (EC2 instance"),
        ("gs://bucket", "google_settings", "_PRODUCT", "Google Compute Engine\n", "account of the machine"),
        (AZ, "azure_settings", "_ASSET_TAG", "7783-7084-3265-9085-8269-3286-77\n", "identity of the machine"),
    ],
)
def test_on_a_machine_of_the_cloud_its_identity_is_used(
    location: str,
    module: str,
    name: str,
    content: str,
    said: str,
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = home.write("dmi", content)
    monkeypatch.setattr(f"hotstart.storage.{module}.{name}", file)
    assert said in home.settings(location, AWS_EC2_METADATA_DISABLED="").described


def test_without_any_credentials_requests_are_unsigned_and_the_advice_says_where_was_looked(
    home: Home,
) -> None:
    settings = home.settings()
    assert "credentials: none found, unsigned" in settings.described
    assert "nor AWS_WEB_IDENTITY_TOKEN_FILE" in settings.advice
    assert "off: AWS_EC2_METADATA_DISABLED" in settings.advice


def test_tensorizers_variables_when_only_they_are_set(home: Home) -> None:
    theirs = {
        "S3_ACCESS_KEY_ID": "AKTZ", "S3_SECRET_ACCESS_KEY": "hush", "S3_ENDPOINT_URL": "object.store.example",
    }  # fmt: skip
    settings = home.settings(**theirs)
    assert keys_of(settings)[0] == "AKTZ"
    assert "endpoint https://object.store.example (S3_ENDPOINT_URL)" in settings.described
    assert keys_of(home.settings(**theirs, **KEYS))[0] == "AKID"


def test_a_service_accounts_key_signs_and_a_users_login_is_read_by_the_client(home: Home) -> None:
    account = home.write(
        "key.json", json.dumps({"type": "service_account", "client_email": "a@b", "private_key": "hush"})
    )
    settings = home.settings(GS, GOOGLE_APPLICATION_CREDENTIALS=account)
    assert settings.signs
    assert f"service account a@b of {account} (GOOGLE_APPLICATION_CREDENTIALS)" in settings.described
    home.write(".config/gcloud/application_default_credentials.json", '{"type": "authorized_user"}')
    settings = home.settings(GS)
    assert not settings.signs
    assert "gcloud auth application-default login" in settings.described


@pytest.mark.parametrize(
    ("environ", "base_url"),
    [
        ({}, "https://storage.googleapis.com/bucket"),
        ({"STORAGE_EMULATOR_HOST": "127.0.0.1:9023"}, "http://127.0.0.1:9023/bucket"),
        ({"STORAGE_EMULATOR_HOST": "http://gcs:1/"}, "http://gcs:1/bucket"),
        ({"RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS": "true"}, "https://storage.googleapis.com/bucket"),
    ],
)
def test_anonymous_access_to_google(home: Home, environ: Mapping[str, str], base_url: str) -> None:
    assert home.settings(GS, **environ).base_url == base_url


@pytest.mark.parametrize(
    ("text", "said"), [("{", "no JSON object"), ('{"type": "external_account"}', "of the kind")]
)
def test_credentials_of_google_that_cannot_be_used(home: Home, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        home.settings(GS, GOOGLE_APPLICATION_CREDENTIALS=home.write("key.json", text))


@pytest.mark.parametrize(
    ("location", "environ", "said"),
    [
        (AZ, {}, "account acc (the address), endpoint https://acc.blob.core.windows.net (Azure's own)"),
        (AZ, {}, "none found, anonymous"),
        (AZ, {"AZURE_STORAGE_ACCOUNT_KEY": "aHVzaA=="}, "account key (AZURE_STORAGE_ACCOUNT_KEY)"),
        ("az://c", {"AZURE_STORAGE_ACCOUNT_NAME": "acc"}, "account acc (AZURE_STORAGE_ACCOUNT_NAME)"),
        ("az://c", {"AZURE_STORAGE_USE_EMULATOR": "1"}, "http://127.0.0.1:10000/devstoreaccount1"),
        (
            "az://c",
            {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=a;AccountKey=aHVzaA==;"},
            "https://a.blob.",
        ),
        (AZ, {"AZURE_STORAGE_SAS_TOKEN": "?sig=hush"}, "shared access signature (AZURE_STORAGE_SAS_TOKEN)"),
        ("https://acc.blob.core.windows.net/c?sig=hush", {}, "shared access signature (the address)"),
        (
            AZ,
            {"AZURE_CLIENT_ID": "id", "AZURE_TENANT_ID": "t", "AZURE_CLIENT_SECRET": "hush"},
            "service principal id (AZURE_CLIENT_ID), read through obstore",
        ),
        (
            AZ,
            {"AZURE_CLIENT_ID": "id", "AZURE_TENANT_ID": "t", "AZURE_FEDERATED_TOKEN_FILE": "/dev/null"},
            "workload identity id",
        ),
        (AZ, {"AZURE_MSI_ENDPOINT": "http://x"}, "identity of the machine (AZURE_MSI_ENDPOINT)"),
    ],
)
def test_azure(home: Home, location: str, environ: Mapping[str, str], said: str) -> None:
    settings = home.settings(location, **environ)
    assert said in settings.described
    assert "hush" not in settings.described + settings.advice + repr(settings)
    assert settings.open(parse_location(location)) is not None


@pytest.mark.parametrize(
    ("location", "environ", "said"),
    [
        ("az://c/m", {}, "Pass abfss://c@ACCOUNT.dfs.core.windows.net/m"),
        (AZ, {"AZURE_CLIENT_SECRET": "hush", "AZURE_CLIENT_ID": "id"}, "AZURE_TENANT_ID is not"),
        (AZ, {"AZURE_STORAGE_CONNECTION_STRING": "hush"}, "is no connection string"),
    ],
)
def test_azure_refused(home: Home, location: str, environ: Mapping[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        home.settings(location, **environ)
    assert said in str(caught.value)
    assert "hush" not in str(caught.value)


@given(
    st.dictionaries(
        st.sampled_from([*KEYS, "AWS_SESSION_TOKEN", "S3_SECRET_ACCESS_KEY", "AWS_REGION"]), st.just("hush")
    )
)
def test_no_secret_is_described_or_represented(environ: dict[str, str]) -> None:
    environ |= {"HOME": "/nonexistent", "AWS_REGION": "eu-west-1", "AWS_ACCESS_KEY_ID": "AKID", **NO_ROLE}
    try:
        settings = settings_for(parse_location("s3://bucket"), environ)
        said = settings.described + settings.advice + repr(settings)
    except ConfigError as error:
        said = str(error)
    assert "hush" not in said


VARIABLES = [
    *KEYS, "AWS_SESSION_TOKEN", "AWS_CREDENTIAL_EXPIRATION", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN",
    "AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_S3_ADDRESSING_STYLE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE", "AWS_CA_BUNDLE", "S3_ENDPOINT_URL",
    "RUNAI_STREAMER_S3_ENDPOINT", "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "SSL_CERT_FILE",
    "GOOGLE_SERVICE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_ENDPOINT", "AZURE_CLIENT_SECRET",
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        ["1", "true", "/dev/null", "/", "http://[", "https://x:y", "bucket", "{}", "AccountName=a"]
    ),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
)


@given(st.sampled_from(["s3", "gs", "az"]), st.dictionaries(st.sampled_from(VARIABLES), VALUES, max_size=5))
def test_whatever_the_variables_hold_there_are_settings_or_a_configuration_error(
    scheme: str, environ: dict[str, str]
) -> None:
    try:
        settings = settings_for(
            parse_location(f"{scheme}://bucket/m"), {"HOME": "/proc/nowhere", **NO_ROLE, **environ}
        )
    except ConfigError:
        return
    assert settings.endpoint.startswith(("http://", "https://"))
    assert "\n" not in settings.described


@given(st.text("[]=\n profile#;%dxz", max_size=80))
def test_whatever_a_file_of_aws_holds_there_are_settings_or_a_configuration_error(text: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix="config") as file:
        file.write(text)
        file.flush()
        environ = {
            "HOME": "/proc/nowhere",
            **NO_ROLE,
            "AWS_CONFIG_FILE": file.name,
            "AWS_SHARED_CREDENTIALS_FILE": file.name,
        }
        with contextlib.suppress(ConfigError):
            assert settings_for(parse_location("s3://bucket"), environ).described
