"""The small files of a model are the same ones, whether a directory, a bucket or the hub has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from msgspec.structs import replace

from checkpoint_files import STUB
from fault_proxy import Fault, FaultServer
from hotstart.checkpoint.base import ModelFiles
from hotstart.checkpoint.files import SMALL_FILES, TEMPLATES, load_model_files, template_names
from hotstart.checkpoint.hub import ALLOW, IGNORE
from hotstart.checkpoint.remote import fetch_small_files, open_store
from hotstart.errors import ModelError, ProblemsFound
from object_servers import KEY, SECRET, OpenS3Server, S3Server

S3 = "s3://models/m"
CONTENT = {
    "tokenizer_config.json": json.dumps({"chat_template": "of the tokenizer's configuration"}),
    "chat_template.jinja": "of a file",
    "chat_template.json": json.dumps({"chat_template": "of a processor"}),
    "merges.txt": "a b\n",
    f"{TEMPLATES}/tool_use.jinja": "with tools",
    f"{TEMPLATES}/rag.jinja": "with documents",
}


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A folder with every small file there is, and others that nobody wants."""
    folder = tmp_path / "buckets" / "models" / "m"
    (folder / TEMPLATES).mkdir(parents=True)
    for name in (*SMALL_FILES, *CONTENT):
        (folder / name).write_text(CONTENT.get(name, json.dumps({"file": name})))
    for name in ("README.md", f"{TEMPLATES}/notes.txt", f"{TEMPLATES}/.hidden.jinja", "training_args.bin"):
        (folder / name).write_text("nothing that is read")
    return folder


@pytest.fixture
def s3(bucket: Path) -> Iterator[S3Server]:
    with S3Server(bucket.parent.parent) as server:
        yield server


def fetched(location: str, environ: dict[str, str], cache: Path) -> Path:
    store = open_store(location, environ=environ, patience=5.0)
    try:
        return Path(fetch_small_files(store, str(cache)))
    finally:
        store.close()


def names(directory: Path) -> set[str]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".generation.json")
    return {str(path.relative_to(directory)) for path in files}


def contents(files: ModelFiles) -> ModelFiles:
    """Without the paths."""
    tokenizer = [
        Path(path).read_bytes() for path in (files.tokenizer_json, files.vocab_json, files.merges_txt) if path
    ]
    source = Path(files.chat_template_source).name
    return replace(
        files,
        path="",
        tokenizer_json=str(tokenizer),
        vocab_json="",
        merges_txt="",
        chat_template_source=source,
    )


def test_a_bucket_gives_what_its_directory_gives(s3: S3Server, bucket: Path, tmp_path: Path) -> None:
    of_bucket = fetched(S3, s3.environ, tmp_path / "cache")
    assert names(of_bucket) == {*SMALL_FILES, *CONTENT}
    expected = load_model_files(str(bucket))
    assert set(expected.chat_templates) == {"default", "tool_use", "rag"}
    assert contents(load_model_files(str(of_bucket))) == contents(expected)


def test_a_template_that_is_added_is_in_the_next_start(s3: S3Server, bucket: Path, tmp_path: Path) -> None:
    first = fetched(S3, s3.environ, tmp_path / "cache")
    assert fetched(S3, s3.environ, tmp_path / "cache") == first
    (bucket / TEMPLATES / "json.jinja").write_text("as JSON")
    (bucket / TEMPLATES / "rag.jinja").unlink()
    second = fetched(S3, s3.environ, tmp_path / "cache")
    assert names(second) - names(first) == {f"{TEMPLATES}/json.jinja"}
    assert names(first) - names(second) == {f"{TEMPLATES}/rag.jinja"}


@pytest.mark.parametrize("status", [403, 405])
def test_a_store_that_cannot_be_listed_gives_everything_with_a_name_of_its_own(
    status: int, bucket: Path, tmp_path: Path
) -> None:
    files = {f"models/m/{name}": (bucket / name).read_bytes() for name in SMALL_FILES}
    refused = Fault(path="", if_range=lambda begin, end: end == 1 << 62, status=status, body=b"")
    with FaultServer(files, refused) as server:
        environ = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        assert names(fetched(S3, environ, tmp_path / "cache")) == set(SMALL_FILES)
        assert any("list-type" in request.target for request in server.requests)


@pytest.mark.parametrize("signed", [True, False])
def test_a_store_whose_listings_fail_is_asked_for_one_once_for_each_look(
    signed: bool, bucket: Path, tmp_path: Path
) -> None:
    files = {f"models/m/{name}": (bucket / name).read_bytes() for name in SMALL_FILES}
    failing = Fault(path="", if_range=lambda begin, end: end == 1 << 62, status=503, body=b"")
    with FaultServer(files, failing) as server:
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        environ = {"AWS_ENDPOINT_URL": server.url, **(keys if signed else {"AWS_NO_SIGN_REQUEST": "1"})}
        assert names(fetched(S3, environ, tmp_path / "cache")) == set(SMALL_FILES)
        assert sum("list-type" in request.target for request in server.requests) == 2  # of a new folder


def test_a_store_that_asks_nobody_who_he_is_needs_no_client_of_its_cloud(
    bucket: Path, tmp_path: Path
) -> None:
    text = (
        "import sys; from hotstart.checkpoint.remote import fetch_small_files, open_store; import os\n"
        "print(fetch_small_files(open_store(sys.argv[1], environ=os.environ, patience=5.0), sys.argv[2]))\n"
        "assert 'obstore' not in sys.modules"
    )
    with OpenS3Server(bucket.parent.parent) as server:
        environ = {**os.environ, **server.environ, "AWS_NO_SIGN_REQUEST": "1"}
        command = [sys.executable, "-c", text, S3, str(tmp_path / "cache")]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    assert names(Path(done.stdout.strip())) == {*SMALL_FILES, *CONTENT}


def test_a_web_server_is_not_asked_for_a_listing(bucket: Path, tmp_path: Path) -> None:
    files = {f"m/{name}": (bucket / name).read_bytes() for name in names(bucket)}
    with FaultServer(files) as server:
        assert names(fetched(f"{server.url}/m", {}, tmp_path)) == set(SMALL_FILES)
        assert {request.path.removeprefix("/m/") for request in server.requests} == set(SMALL_FILES)


def test_the_hub_gives_all_of_them() -> None:
    for name in (*SMALL_FILES, *CONTENT):
        assert any(fnmatch(name, pattern) for pattern in ALLOW)
        assert not any(fnmatch(name, pattern) for pattern in IGNORE)


def test_names_of_templates_lead_nowhere_else() -> None:
    strange = ["../a.jinja", "a/b.jinja", ".jinja", "a\n.jinja", "a.jinja.txt", "default.jinja"]
    assert template_names([*strange, "b c.jinja", "a.jinja"]) == ["a.jinja", "b c.jinja"]


def test_what_is_wrong_with_a_file_of_a_bucket_is_told_by_its_address(
    s3: S3Server, bucket: Path, tmp_path: Path
) -> None:
    (bucket / "tokenizer.json").write_bytes(STUB)
    (bucket / "tokenizer_config.json").write_text("{")
    (bucket / "generation_config.json").write_bytes(b"\xff")
    (bucket / TEMPLATES / "rag.jinja").write_bytes(STUB)
    of_bucket = fetched(S3, s3.environ, tmp_path / "cache")
    with pytest.raises(ProblemsFound) as caught:
        load_model_files(str(of_bucket), shown=S3)
    found = sorted(problem.found.split(" is ")[0] for problem in caught.value.problems)
    files = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", f"{TEMPLATES}/rag.jinja")
    assert found == sorted(f"{S3}/{name}" for name in files)
    assert str(of_bucket) not in str(caught.value)


def test_a_template_too_large_to_be_one_is_refused(s3: S3Server, bucket: Path, tmp_path: Path) -> None:
    with (bucket / TEMPLATES / "rag.jinja").open("r+b") as file:
        file.truncate(5 << 20)
    with pytest.raises(ModelError, match=rf"{TEMPLATES}/rag\.jinja has 5\.24 MB; expected at most 4\.19 MB"):
        fetched(S3, s3.environ, tmp_path / "cache")
