"""Models by hub name, against a hub on loopback; each call in a process of its own, as a start is.

The library reads most of its variables when it is imported, so only a new process proves that they
are honoured.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import write_model
from hub_stand_in import COMMIT, Hub, serve

NAME = "someone/tiny"
SCRIPT = """
import json, sys
from hotstart.checkpoint.resolve import resolve
from hotstart.errors import HotstartError
try:
    print(json.dumps({"path": resolve(**json.loads(sys.argv[1]))}))
except HotstartError as error:
    print(json.dumps({"kind": error.kind, "text": str(error)}))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    model = write_model(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    others = ("pytorch_model.bin", "consolidated.safetensors", "original/params.json", "model.gguf", "a.png")
    files |= dict.fromkeys(others, b"not wanted")
    files |= {"chat_template.jinja": b"{{ messages }}", "merges.txt": b"#version: 0.2\n"}
    with serve(Hub(NAME, files)) as running:
        yield running


class Starts:
    """Resolves names in new processes that share a cache."""

    def __init__(self, hub: Hub, cache: Path) -> None:
        self.hub = hub
        self.cache = cache

    def __call__(
        self, name: str = NAME, *, env: dict[str, str] | None = None, **options: Any
    ) -> dict[str, str]:
        options = {"model": name, "hub_cache": str(self.cache), "progress": False, **options}
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(options)],
            env={
                "PYTHONPATH": os.pathsep.join(sys.path),
                "HF_HOME": str(self.cache.parent / "home"),
                "HF_ENDPOINT": self.hub.endpoint,
                **(env or {}),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 0, result.stderr
        answer: dict[str, str] = json.loads(result.stdout)
        return answer


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> Starts:
    return Starts(hub, tmp_path / "cache")


def test_what_serving_needs_is_downloaded_and_nothing_else(start: Starts, hub: Hub) -> None:
    path = Path(start()["path"])
    assert path == start.cache / "models--someone--tiny" / "snapshots" / COMMIT
    names = {"config.json", "model.safetensors.index.json", "chat_template.jinja", "merges.txt"}
    names |= {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert {file.name for file in path.iterdir()} == names == hub.downloaded
    assert (path / "config.json").read_bytes() == hub.files["config.json"]


def test_download_dir_wins_over_the_cache(start: Starts, tmp_path: Path) -> None:
    assert start(download_dir=str(tmp_path / "mine"))["path"].startswith(str(tmp_path / "mine"))


def test_without_a_cache_of_ours_the_library_chooses_by_its_variables(start: Starts, tmp_path: Path) -> None:
    path = start(hub_cache=None, env={"HF_HUB_CACHE": str(tmp_path / "shared")})["path"]
    assert path.startswith(str(tmp_path / "shared"))


def test_offline_start_from_a_complete_copy_asks_nobody(start: Starts, hub: Hub) -> None:
    first = start()
    hub.requests.clear()
    assert start(env={"HF_HUB_OFFLINE": "1"}) == first
    assert hub.requests == []


def test_offline_without_a_copy_says_so(start: Starts) -> None:
    answer = start(env={"HF_HUB_OFFLINE": "1"})
    assert answer["kind"] == "storage error"
    assert "HF_HUB_OFFLINE forbids downloading it" in answer["text"]


def test_locks_of_others_do_not_hold_up_a_complete_copy(start: Starts, hub: Hub) -> None:
    first = start()
    hub.requests.clear()
    locks = list((start.cache / ".locks").rglob("*.lock"))
    locks += [start.cache / ".locks" / "models--someone--tiny" / f"{name}.lock" for name in ("a", "b")]
    held = []
    for lock in locks:
        held.append(lock.open("w"))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    try:
        assert start() == first
    finally:
        for file in held:
            file.close()
    assert hub.downloaded == set()


def test_lock_files_of_dead_processes_do_not_hold_up_a_download(start: Starts) -> None:
    first = start()
    for link in Path(first["path"]).iterdir():
        blob = link.resolve()
        lock = start.cache / ".locks" / "models--someone--tiny" / f"{blob.name}.lock"
        lock.write_text("4194304\nanother-host\n")
        os.utime(lock, (0, 0))
        link.unlink()
        blob.unlink()
    assert start() == first


def test_token_of_the_flag_and_of_the_variable(start: Starts, hub: Hub) -> None:
    hub.token = "hf_secret"
    assert "path" in start(token="hf_secret")
    assert "path" in start(env={"HF_TOKEN": "hf_secret"}, download_dir=str(start.cache / "second"))


def test_gated_model_names_the_endpoint_and_the_token(start: Starts, hub: Hub) -> None:
    hub.token, hub.gated = "hf_right", True
    answer = start(token="hf_wrong")
    assert answer["kind"] == "storage error"
    assert hub.endpoint in answer["text"]
    assert "403" in answer["text"]
    assert "HF_TOKEN" in answer["text"]
    assert "hf_wrong" not in answer["text"]


def test_unknown_model_suggests_a_path(start: Starts, hub: Hub) -> None:
    answer = start("models/llama")
    assert answer["kind"] == "model error"
    assert f"{hub.endpoint} has no model models/llama" in answer["text"]
    assert "./models/llama" in answer["text"]


def test_unknown_revision(start: Starts) -> None:
    answer = start(revision="v9")
    assert answer["kind"] == "model error"
    assert "no revision v9" in answer["text"]


def test_unreachable_hub_names_the_endpoint_and_the_cause(start: Starts) -> None:
    answer = start(env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert answer["kind"] == "storage error"
    assert "http://127.0.0.1:9" in answer["text"]
    assert "Connect" in answer["text"]


def test_unreachable_hub_does_not_matter_for_a_complete_copy(start: Starts) -> None:
    assert start() == start(env={"HF_ENDPOINT": "http://127.0.0.1:9"})


def test_cache_that_cannot_be_written_is_named(start: Starts) -> None:
    start.cache.write_text("a file where the directory should be")
    answer = start()
    assert answer["kind"] == "storage error"
    assert f"Cannot write {start.cache}" in answer["text"]
    assert "--download-dir" in answer["text"]
