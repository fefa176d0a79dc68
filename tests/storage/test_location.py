"""Every spelling of a location that people use, and what is said of those that cannot be meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotstart.cli.main import main
from hotstart.config.parse import parse_serve
from hotstart.errors import ConfigError
from hotstart.storage.location import Location, is_location, parse_location

NAMES = st.text("abcXYZ019-_ é%+", min_size=1, max_size=8)
SLASHES = st.sampled_from(["/", "//", "/./", "///"])
STORES = st.sampled_from(["s3", "S3", "s3a", "gs", "gcs", "az", "azure"])


@given(STORES, st.lists(NAMES, max_size=4), st.data())
def test_slashes_and_dots_between_names_mean_nothing(
    scheme: str, names: list[str], data: st.DataObject
) -> None:
    text = f"{scheme}://bucket"
    for name in names:
        text += data.draw(SLASHES) + name
    text += data.draw(st.sampled_from(["", "/", "//", "/./"]))
    location = parse_location(text)
    assert (location.container, location.prefix) == ("bucket", "/".join(names))
    assert location.key("config.json") == "/".join([*names, "config.json"])


@given(st.lists(NAMES, max_size=4), st.sampled_from(["s3", "gs", "az", "http", "https"]))
def test_a_location_means_the_same_as_what_it_is_printed_as(names: list[str], scheme: str) -> None:
    location = Location(scheme, "host", "/".join(names))
    assert parse_location(str(location)) == location


@given(
    st.sampled_from(["s3", "gs", "az", "abfss", "wasbs", "http", "https", "hf", "ftp"]), st.text(max_size=30)
)
def test_any_text_is_a_location_or_a_configuration_error(scheme: str, rest: str) -> None:
    try:
        location = parse_location(f"{scheme}://{rest}")
    except ConfigError:
        return
    assert location.container
    assert not location.prefix.startswith("/")
    assert not location.prefix.endswith("/")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", Location("s3", "bucket", "")),
        ("s3:///bucket/", Location("s3", "bucket", "")),
        ("s3n://bucket/a", Location("s3", "bucket", "a")),
        ("https://bucket.s3.eu-west-1.amazonaws.com/a", Location("s3", "bucket", "a", region="eu-west-1")),
        ("https://s3.us-east-2.amazonaws.com/bucket/a/", Location("s3", "bucket", "a", region="us-east-2")),
        ("https://my.bucket.s3.amazonaws.com/a", Location("s3", "my.bucket", "a")),
        ("https://storage.googleapis.com/bucket/a/b", Location("gs", "bucket", "a/b")),
        ("https://bucket.storage.googleapis.com/a", Location("gs", "bucket", "a")),
        ("abfss://c@acc.dfs.core.windows.net/a/", Location("az", "c", "a", "acc")),
        ("wasbs://c@acc.blob.core.windows.net", Location("az", "c", "", "acc")),
        ("az://acc.blob.core.windows.net/c/a", Location("az", "c", "a", "acc")),
        ("abfs://c@acc/a", Location("az", "c", "a", "acc")),
        ("https://acc.blob.core.windows.net/c//a", Location("az", "c", "a", "acc")),
        ("https://acc.dfs.core.windows.net/c/a?sv=1&sig=x", Location("az", "c", "a", "acc", "sv=1&sig=x")),
        (
            "https://acc.blob.core.usgovcloudapi.net/c/a",
            Location("az", "c", "a", "acc", domain="core.usgovcloudapi.net"),
        ),
        ("http://files.example:8080//models/a%20b/", Location("http", "files.example:8080", "models/a b")),
        ("https://files.example", Location("https", "files.example", "")),
        ("http://[::1]:80/a", Location("http", "[::1]:80", "a")),
        ("https://files.example/a?token=x", Location("https", "files.example", "a", query="token=x")),
    ],
)
def test_spelling(text: str, expected: Location) -> None:
    assert is_location(text)
    assert parse_location(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3://", "names no bucket"),
        ("s3:///", "names no bucket"),
        ("az://acc.blob.core.windows.net/", "names no container"),
        ("s3://localhost:9000/bucket/a", "Set the endpoint"),
        ("s3://KEY:SECRET@bucket/a", "Set the endpoint and the credentials by environment variables"),
        ("s3://bucket/a?region=x", "without a port, a user or a query"),
        ("s3://bucket/a/../b", "has a component that no key can have"),
        ("http:///models", "names no host"),
        ("http://host:port/models", "names no host"),
        ("https://user:pass@host/models", "carries a user name"),
        ("https://s3.console.aws.amazon.com/s3/buckets/b", "page of a cloud's console"),
        ("https://console.cloud.google.com/storage/browser/b", "page of a cloud's console"),
        ("s3://bucket/a/model.safetensors", "Pass the folder: s3://bucket/a."),
        ("https://host/a/model-00001-of-00002.safetensors", "Pass the folder: https://host/a."),
        ("gs://bucket/config.json", "Pass the folder: gs://bucket."),
        ("http://host/model.tar", "is the address of a file"),
        ("ftp://host/a", "is no location of a model"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "is no location of a model"),
    ],
)
def test_what_cannot_be_meant(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_location(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hush@host/a",
        "s3://key:hush@bucket/a",
        "ftp://user:hush@host/a",
        "https://host/a/../b?sig=hush",
        "https://host/model.safetensors?sig=hush",
        "https://user:hush@host:port/a",
        "https://acc.blob.core.windows.net/c/model.safetensors?sig=hush",
    ],
)
def test_a_refusal_repeats_no_secret(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_location(text)
    assert "hush" not in str(caught.value)


def test_a_signature_in_an_address_is_neither_reported_nor_served(capsys: pytest.CaptureFixture[str]) -> None:
    address = "https://host/model.tar?sig=hush"
    main(["check", address, "--port", "0"])
    assert "https://host/model.tar" in capsys.readouterr().out
    parsed = parse_serve([address], environ={})
    assert parsed.config.model.served_model_name == ("https://host/model.tar",)


@pytest.mark.parametrize(
    "text", ["./s3", "org/name", "/s3://x", "file:///models", "hf://a/b", "https://hf.co/Qwen/Qwen3-0.6B"]
)
def test_paths_names_and_pages_of_the_hub_are_no_locations(text: str) -> None:
    assert not is_location(text)
