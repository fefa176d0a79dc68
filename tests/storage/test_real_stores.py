"""Listing, reading and refusals of real object stores, as a loader meets them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from checkpoint_files import Tensors, write_model
from fault_proxy import Fault, FaultServer
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder, fetch_small_files, open_store
from hotstart.errors import HotstartError, ModelError, StorageError
from hotstart.storage.object_store import NEVER, ObjectStore
from object_servers import (
    AZURITE_KEY,
    KEY,
    SECRET,
    AzureServer,
    GcsServer,
    NanioServer,
    ObjectServer,
    OpenS3Server,
    S3Server,
)

DATA = bytes(range(256)) * 40
ODD = "a b+c=%41ü&"
ODD_NAMES = {
    "a b",
    "+",
    "%2F",
    "%",
    "ü",
    "u\u0308",
    "日本",
    "a?b",
    "a#b",
    "a&b=c",
    "'(*)!",
    "~",
    "[{|}]^`",
    ";@:$,",
    '"<>"',
}
WHOLE: Tensors = {f"t{number}": ("F32", (4,)) for number in range(4)}
NO_ROLE = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": "/proc/nowhere"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two buckets: a model at the root of one, and below a prefix of the other, beside other folders."""
    root = tmp_path_factory.mktemp("buckets")
    for folder in (root / "rooted", root / "models" / "team-a" / "tiny"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "model.safetensors").write_bytes(DATA)
        (folder / "original").mkdir()
        (folder / "original" / "params.json").write_text("{}")
        (folder / "logs" / "deep").mkdir(parents=True)
        (folder / "logs" / "deep" / "log").write_text("x")
    (root / "models" / ODD).mkdir()
    for name in ODD_NAMES:
        (root / "models" / ODD / name).write_text(name)
    write_model(root / "models" / "whole", tensors=WHOLE, shards=2)
    (root / "models" / "team-a" / "tony").mkdir()
    (root / "models" / "team-a" / "tony" / "config.json").write_text("{}")
    return root


NAMES = {"config.json", "model.safetensors", "original/params.json"}


@pytest.fixture(scope="module")
def s3(root: Path) -> Iterator[ObjectServer]:
    with S3Server(root) as server:
        yield server


SERVERS = ["hadro", "localbucket", "nanio", "fake-gcs-server", "azurite"]


@pytest.fixture(scope="module", params=SERVERS)
def any_server(
    request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ObjectServer]]:
    if request.param == "azurite":
        if AzureServer.program is None:
            pytest.skip("azurite is not installed (npm install -g azurite)")
        with AzureServer(root, tmp_path_factory.mktemp("azurite")) as azure:
            yield "az", azure
        return
    kinds = {
        "hadro": S3Server, "localbucket": OpenS3Server, "nanio": NanioServer, "fake-gcs-server": GcsServer,
    }  # fmt: skip
    with kinds[request.param](root) as server:
        yield "gs" if request.param == "fake-gcs-server" else "s3", server


def opened(location: str, server: ObjectServer, **environ: str) -> ObjectStore:
    return open_store(location, environ={**NO_ROLE, **server.environ, **environ}, patience=5.0)


def test_a_folder_is_listed_and_its_files_are_read(any_server: tuple[str, ObjectServer]) -> None:
    scheme, server = any_server
    store = opened(f"{scheme}://models/team-a/tiny", server)
    assert {name: info.size for name, info in store.list().items()}["model.safetensors"] == len(DATA)
    assert set(store.list()) == NAMES
    assert store.fetch("absent.json", 100) is None
    first = store.fetch("model.safetensors", 100)
    assert first is not None
    assert (first.data, first.size) == (DATA[:100], len(DATA))
    source = store.source(store.location.key("model.safetensors"), first.size, first.identity)
    buffer = bytearray(5000)
    source.read_into(memoryview(buffer), 3000, NEVER)
    source.close()
    store.close()
    assert buffer == DATA[3000:8000]


def test_an_absent_folder_comes_with_the_nearest(any_server: tuple[str, ObjectServer]) -> None:
    scheme, server = any_server
    with pytest.raises(ModelError) as caught:
        opened(f"{scheme}://models/team-a/tiney/", server).list()
    assert f"There is nothing in {scheme}://models/team-a/tiney" in str(caught.value).replace(
        f"abfss://models@{'devstoreaccount1'}.dfs.core.windows.net", "az://models"
    )
    assert f"Did you mean {scheme}://models/team-a/tiny" in str(caught.value)


def test_an_absent_bucket_is_named(any_server: tuple[str, ObjectServer]) -> None:
    scheme, server = any_server
    with pytest.raises(HotstartError, match=rf"{scheme}://modules.*(404|no bucket named modules)") as caught:
        opened(f"{scheme}://modules/tiny", server).list()
    assert server.endpoint in str(caught.value)


@pytest.mark.parametrize("any_server", [name for name in SERVERS if name != "nanio"], indirect=True)
def test_every_key_that_a_listing_returns_can_be_read(any_server: tuple[str, ObjectServer]) -> None:
    """All but nanio's, which refuses the signature of such keys, obstore's own too."""
    scheme, server = any_server
    store = opened(f"{scheme}://models/{ODD}", server)
    listed = set(store.list())
    assert listed == ODD_NAMES
    for name in listed:
        fetched = store.fetch(name, 100)
        assert fetched is not None, name
        assert fetched.data == name.encode()
    store.close()


def test_small_files_of_a_folder_are_listed_by_name(any_server: tuple[str, ObjectServer]) -> None:
    scheme, server = any_server
    store = opened(f"{scheme}://models/team-a/tiny", server)
    assert store.names("original") == ["params.json"]
    assert store.names("absent") == []
    store.close()


def test_a_small_model_loads(any_server: tuple[str, ObjectServer], tmp_path: Path) -> None:
    """Each of its files is smaller than what is asked for first."""
    scheme, server = any_server
    store = opened(f"{scheme}://models/whole", server)
    folder = ObjectFolder(store, fetch_small_files(store, str(tmp_path)))
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == set(WHOLE)
    for file in checkpoint.files:
        with closing(folder.source(file)) as source:
            source.read_into(memoryview(bytearray(file.size)), 0, NEVER)
    store.close()


@pytest.mark.parametrize(
    "location",
    [
        "s3://rooted", "s3://rooted/", "s3://rooted//", "S3://rooted/.", "s3a://rooted", "s3:///rooted/",
        "s3://models/team-a/tiny", "s3://models/team-a/tiny/", "s3://models//team-a//tiny//",
        "s3a://models/team-a/./tiny", "s3n:///models/team-a/tiny", "S3://models/team-a/tiny/.",
    ],
)  # fmt: skip
def test_every_spelling_finds_the_model(location: str, s3: ObjectServer) -> None:
    store = opened(location, s3)
    assert set(store.list()) == NAMES
    assert store.fetch("config.json", 100) is not None
    store.close()


@pytest.mark.parametrize("spelling", ["m", "m/", "m//", "/m", "./m", "m/."])
def test_every_spelling_of_a_web_address_finds_the_model(spelling: str, tmp_path: Path) -> None:
    with FaultServer({"m/config.json": b"{}"}) as server:
        store = open_store(f"{server.url}/{spelling}", environ={}, patience=5.0)
        assert Path(fetch_small_files(store, str(tmp_path)), "config.json").exists()
        store.close()


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("s3://models/team-a/tinny", "There is nothing in .*Did you mean s3://models/team-a/tiny"),
        ("s3://models/teem-a/tiny", "There is nothing in .*Did you mean s3://models/team-a"),
        ("s3://rootet", "NoSuchBucket.*Check the bucket's name"),
    ],
)
def test_a_wrong_letter_ends_a_start_with_what_is_near(
    location: str, said: str, s3: ObjectServer, tmp_path: Path
) -> None:
    store = opened(location, s3)
    with pytest.raises(HotstartError, match=said):
        fetch_small_files(store, str(tmp_path))
    store.close()


def test_the_standard_endpoint_is_asked_though_another_programs_variable_names_one(s3: ObjectServer) -> None:
    store = opened("s3://rooted", s3, RUNAI_STREAMER_S3_ENDPOINT="http://127.0.0.1:1")
    assert set(store.list()) == NAMES
    assert store.fetch("config.json", 100) is not None
    assert "RUNAI_STREAMER_S3_ENDPOINT differs and is not used" in store.settings.described
    store.close()


def test_another_programs_variable_is_understood_when_only_it_is_set(s3: ObjectServer) -> None:
    store = opened("s3://rooted", s3, AWS_ENDPOINT_URL="", RUNAI_STREAMER_S3_ENDPOINT=s3.endpoint)
    assert set(store.list()) == NAMES
    assert store.fetch("config.json", 100) is not None
    store.close()


def test_a_parent_of_models_names_them(s3: ObjectServer) -> None:
    with pytest.raises(ModelError, match=r"holds folders and no files: team-a/tiny, team-a/tony"):
        opened("s3://models/team-a", s3).list()


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("kind", [S3Server, OpenS3Server])
def test_shards_behind_more_objects_than_a_page_holds_are_found(
    kind: type[S3Server], index: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "buckets" / "models" / "tiny"
    tensors: Tensors = {f"t{index}": ("F32", (4,)) for index in range(6)}
    write_model(folder, tensors=tensors, shards=3, index=index)
    for number in range(1500):
        (folder / f"checkpoint-log-{number:04}.txt").touch()
    with kind(tmp_path / "buckets") as server:
        store = opened("s3://models/tiny", server)
        checkpoint = open_checkpoint(ObjectFolder(store, fetch_small_files(store, str(tmp_path / "cache"))))
        store.close()
    assert set(checkpoint.tensors) == set(tensors)
    assert len(checkpoint.files) == 3


@pytest.mark.parametrize(
    ("environ", "said", "advice"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "hush"}, "403 SignatureDoesNotMatch", "secret key is wrong"),
        ({"AWS_ACCESS_KEY_ID": "AKIAOTHER"}, "403 InvalidAccessKeyId", "is it the right endpoint"),
        (
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            "403 AccessDenied",
            "No credentials were found",
        ),
    ],
)
@pytest.mark.parametrize("doing", ["list", "fetch"])
def test_wrong_credentials_are_told_by_the_servers_words_and_the_likely_cause(
    environ: dict[str, str], said: str, advice: str, doing: str, s3: ObjectServer
) -> None:
    store = opened("s3://models/team-a/tiny", s3, **environ)
    with pytest.raises(StorageError) as caught:
        store.list() if doing == "list" else store.fetch("config.json", 100)
    store.close()
    text = str(caught.value)
    assert said in text
    assert advice in text
    assert s3.endpoint in text
    assert "hush" not in text
    assert SECRET not in text


def error(code: str, message: str = "no", more: str = "") -> bytes:
    return f"<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>".encode()


REFUSALS = {
    "another region": (
        Fault(status=400, body=error("AuthorizationHeaderMalformed", "expecting 'eu-west-3'")),
        "set AWS_REGION to it",
        "the region eu-west-3",
    ),
    "another region, by header": (
        Fault(status=301, body=error("PermanentRedirect"), headers={"x-amz-bucket-region": "ap-south-1"}),
        "set AWS_REGION to it",
        "the region ap-south-1",
    ),
    "expired": (Fault(status=400, body=error("ExpiredToken")), "400 ExpiredToken: no", "get new credentials"),
    "skewed": (
        Fault(
            status=403, body=error("SignatureDoesNotMatch"), headers={"Date": "Tue, 01 Jan 2019 00:00:00 GMT"}
        ),
        "403 SignatureDoesNotMatch",
        "minutes ahead of the store's: set it",
    ),
    "no bucket": (
        Fault(status=404, body=error("NoSuchBucket")),
        "NoSuchBucket",
        "AWS_S3_ADDRESSING_STYLE=virtual",
    ),
    "denied": (Fault(status=403, body=error("AccessDenied")), "403 AccessDenied", "s3:GetObject"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_code_message_and_likely_cause(name: str) -> None:
    fault, said, advice = REFUSALS[name]
    fault.seen = 0
    with FaultServer({"models/m/config.json": b"{}"}, fault) as server:
        environ = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": "hush"}
        store = open_store("s3://models/m", environ={**NO_ROLE, **environ}, patience=2.0)
        with pytest.raises(StorageError) as caught:
            store.fetch("config.json", 100)
        store.close()
    text = str(caught.value)
    assert said in text
    assert advice in text
    assert "s3://models/m/config.json" in text
    assert server.url in text
    assert "hush" not in text


def test_an_address_of_numbers_is_asked_in_path_style_whatever_is_set(s3: ObjectServer) -> None:
    store = opened("s3://rooted", s3, AWS_S3_ADDRESSING_STYLE="virtual")
    assert set(store.list()) == NAMES
    assert store.fetch("config.json", 100) is not None
    assert "path style (no name can stand before an IP address" in store.settings.described
    store.close()


def test_a_listing_that_lasts_in_failing_tells_of_the_stores_load() -> None:
    with FaultServer({}, Fault(status=503, body=error("SlowDown"))) as server:
        environ = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        store = open_store("s3://models/m", environ={**NO_ROLE, **environ}, patience=0.2)
        with pytest.raises(StorageError, match=r"503 SlowDown.*overloaded, or limits requests"):
            store.list()


def test_who_may_not_list_is_told_which_models_need_no_listing() -> None:
    with FaultServer({}, Fault(status=403, body=error("AccessDenied"))) as server:
        environ = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        store = open_store("s3://models/m", environ={**NO_ROLE, **environ}, patience=2.0)
        with pytest.raises(StorageError, match=r"403 AccessDenied.*s3:ListBucket.*index\.json"):
            store.list()


def test_a_store_that_cannot_be_reached_is_named(s3: ObjectServer) -> None:
    with S3Server(Path("/")) as gone:
        pass
    store = opened("s3://models/m", gone)
    with pytest.raises(StorageError, match="refused") as caught:
        store.list()
    assert gone.endpoint in str(caught.value)


def test_a_bucket_in_the_hosts_name_that_does_not_resolve_advises_path_style() -> None:
    environ = {"AWS_ENDPOINT_URL": "http://store.invalid", "AWS_S3_ADDRESSING_STYLE": "virtual"}
    store = open_store("s3://models/m", environ={**NO_ROLE, **environ}, patience=0.5)
    with pytest.raises(StorageError, match="AWS_S3_ADDRESSING_STYLE=path"):
        store.list()


@pytest.mark.skipif(AzureServer.program is None, reason="azurite is not installed (npm install -g azurite)")
def test_a_wrong_account_key_of_azure_is_told(root: Path, tmp_path: Path) -> None:
    with AzureServer(root, tmp_path) as azure:
        wrong = azure.environ["AZURE_STORAGE_CONNECTION_STRING"].replace(AZURITE_KEY, "d3Jvbmc=")
        store = opened("az://models/team-a/tiny", azure, AZURE_STORAGE_CONNECTION_STRING=wrong)
        with pytest.raises(StorageError, match=r"403 AuthorizationFailure|403 AuthenticationFailed"):
            store.list()
        with pytest.raises(StorageError, match="403"):
            store.fetch("config.json", 100)
        store.close()


def test_a_service_accounts_key_signs_for_google_without_asking_it(root: Path, tmp_path: Path) -> None:
    command = ["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"]
    pem = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout.decode()
    account = {"type": "service_account", "client_email": "a@b", "private_key": pem, "private_key_id": "1"}
    (tmp_path / "key.json").write_text(json.dumps(account))
    with GcsServer(root) as server:
        environ = {
            "GOOGLE_BASE_URL": server.endpoint,
            "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json"),
            "HOME": "/proc/nowhere",
        }
        store = open_store("gs://models/team-a/tiny", environ=environ, patience=5.0)
        assert store.fetch("config.json", 100) is not None
        assert set(store.list()) == NAMES
        assert store.settings.signs
        store.close()


def test_where_addresses_cannot_be_signed_the_client_reads(s3: ObjectServer) -> None:
    store = opened("s3://models/team-a/tiny", s3)
    store.settings.signs = False
    first = store.fetch("model.safetensors", 100)
    assert first is not None
    assert (first.data, first.size) == (DATA[:100], len(DATA))
    assert store.fetch("absent", 100) is None
    again = store.fetch("model.safetensors", 100, known=first.identity)
    assert again is not None
    assert again.unchanged
    source = store.source(store.location.key("model.safetensors"), first.size, first.identity)
    buffer = bytearray(5000)
    source.read_into(memoryview(buffer), 3000, NEVER)
    source.close()
    store.close()
    assert buffer == DATA[3000:8000]


@pytest.mark.skipif(AzureServer.program is None, reason="azurite is not installed (npm install -g azurite)")
def test_a_shared_access_signature_of_azure_lists_and_reads(root: Path, tmp_path: Path) -> None:
    with AzureServer(root, tmp_path) as azure:
        environ = {
            "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
            "AZURE_STORAGE_ENDPOINT": azure.endpoint,
            "AZURE_STORAGE_SAS_TOKEN": azure.signature(),
        }
        store = open_store("az://models/team-a/tiny", environ=environ, patience=5.0)
        assert set(store.list()) == NAMES
        assert store.names("original") == ["params.json"]
        assert store.fetch("config.json", 100) is not None
        store.close()
        environ["AZURE_STORAGE_SAS_TOKEN"] = environ["AZURE_STORAGE_SAS_TOKEN"].replace("sig=", "sig=hush")
        store = open_store("az://models/team-a/tiny", environ=environ, patience=5.0)
        with pytest.raises(StorageError, match="403") as caught:
            store.fetch("config.json", 100)
        store.close()
        assert "hush" not in str(caught.value)
