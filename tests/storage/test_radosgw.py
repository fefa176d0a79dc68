"""Against Ceph's gateway, which decides about rights as production stores do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import radosgw
from checkpoint_files import write_model
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder, fetch_small_files, open_store
from hotstart.errors import ModelError, StorageError
from hotstart.storage.object_store import NEVER, ObjectStore
from radosgw import RadosGateway

pytestmark = [
    pytest.mark.skipif(
        "HOTSTART_TEST_RADOSGW" not in os.environ,
        reason="a cluster of Ceph's takes half a minute to come up: set HOTSTART_TEST_RADOSGW=1",
    ),
    pytest.mark.skipif(
        bool(radosgw.ABSENT),
        reason=f"Ceph is not installed: {radosgw.ABSENT} (Debian: radosgw, ceph-mon, ceph-osd)",
    ),
]

NO_ROLE = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": "/proc/nowhere"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_model(tmp_path_factory.mktemp("model"), shards=3)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def s3(model: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RadosGateway]:
    with RadosGateway(tmp_path_factory.mktemp("ceph")) as server:
        server.upload("models", {f"team/tiny one/{name}": content for name, content in model.items()})
        server.upload("public", {f"tiny/{name}": content for name, content in model.items()}, public=True)
        yield server


def opened(location: str, server: RadosGateway, **environ: str) -> ObjectStore:
    return open_store(location, environ={**NO_ROLE, **server.environ, **environ}, patience=10.0)


def test_a_model_is_listed_and_its_bytes_are_read_by_signed_addresses(
    s3: RadosGateway, model: dict[str, bytes]
) -> None:
    store = opened("s3://models//team/tiny one/", s3)
    assert {name: info.size for name, info in store.list().items()} == {
        name: len(content) for name, content in model.items()
    }
    name = "model-00002-of-00003.safetensors"
    first = store.fetch(name, 10)
    assert first is not None
    source = store.source(store.location.key(name), first.size, first.identity)
    buffer = bytearray(first.size - 7)
    source.read_into(memoryview(buffer), 7, NEVER)
    source.close()
    store.close()
    assert buffer == model[name][7:]


def test_who_may_not_list_loads_the_files_that_the_index_names(s3: RadosGateway, tmp_path: Path) -> None:
    store = opened("s3://public/tiny", s3, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    with pytest.raises(StorageError, match="403 AccessDenied"):
        store.list()
    small_files = fetch_small_files(store, str(tmp_path))
    checkpoint = open_checkpoint(ObjectFolder(store, small_files))
    store.close()
    assert len(checkpoint.files) == 3


def test_an_absent_folder_comes_with_the_nearest(s3: RadosGateway) -> None:
    with pytest.raises(ModelError, match="Did you mean s3://models/team/tiny one"):
        opened("s3://models/team/tiny-one", s3).list()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "hush"}, "403 SignatureDoesNotMatch.*secret key is wrong"),
        ({"AWS_ACCESS_KEY_ID": "OTHER"}, "403 InvalidAccessKeyId.*unknown to this endpoint"),
    ],
)
def test_wrong_credentials_are_told_when_a_file_is_asked_for(
    environ: dict[str, str], said: str, s3: RadosGateway
) -> None:
    store = opened("s3://models/team/tiny one", s3, **environ)
    with pytest.raises(StorageError, match=said):
        store.fetch("config.json", 100)
    store.close()
