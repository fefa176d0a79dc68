"""Models in a store: their small files in the cache, of one state; their weights by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from checkpoint_files import write_model
from fault_proxy import Fault, FaultServer
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.remote import ObjectFolder, fetch_small_files, open_store
from hotstart.errors import ModelError, StorageError

CONFIG, TOKENIZER = "m/config.json", "m/tokenizer.json"
SMALL = {CONFIG: b'{"model_type": "llama"}', TOKENIZER: b'{"version": "1.0"}', "m/merges.txt": b"a b\n"}
EIGHT_DAYS = 8 * 86400


def fetched(server: FaultServer, cache: Path) -> Path:
    store = open_store(f"{server.url}/m", environ={}, patience=5.0)
    try:
        return Path(fetch_small_files(store, str(cache)))
    finally:
        store.close()


def content(directory: Path) -> dict[str, bytes]:
    return {f"m/{path.name}": path.read_bytes() for path in directory.iterdir() if path.name[0] != "."}


def of_folder(directory: Path) -> dict[str, bytes]:
    return {f"m/{path.name}": path.read_bytes() for path in directory.iterdir()}


def test_the_small_files_that_are_there_lie_in_the_cache(tmp_path: Path) -> None:
    with FaultServer(SMALL) as server:
        assert content(fetched(server, tmp_path)) == SMALL


def test_what_did_not_change_is_not_sent_again(tmp_path: Path) -> None:
    with FaultServer(SMALL) as server:
        first = fetched(server, tmp_path)
        sent = server.sent
        errors = 10 * len(b"<Code>NoSuchKey</Code>")
        assert fetched(server, tmp_path) == first
        assert server.sent - sent < errors


def test_a_file_that_changed_makes_another_generation_and_leaves_the_old_one(tmp_path: Path) -> None:
    with FaultServer(SMALL) as server:
        first = fetched(server, tmp_path)
        server.files[TOKENIZER] = b'{"version": "2.0"}'
        assert content(fetched(server, tmp_path)) == server.files
        assert content(first) == SMALL


def test_a_file_that_went_away_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    with FaultServer(SMALL) as server:
        fetched(server, tmp_path)
        del server.files["m/merges.txt"]
        assert content(fetched(server, tmp_path)) == server.files


@pytest.mark.parametrize("etag", ["strong", "none"])
def test_a_model_replaced_between_two_requests_is_fetched_of_one_state(tmp_path: Path, etag: str) -> None:
    new = {name: data + b" " for name, data in SMALL.items()}
    replace = Fault(path="tokenizer.json", nth=1, do=lambda server: server.files.update(new))
    with FaultServer(SMALL, replace, etag=etag) as server:
        assert content(fetched(server, tmp_path)) == new


def test_a_model_that_never_rests_is_refused(tmp_path: Path) -> None:
    def write(server: FaultServer) -> None:
        server.files[TOKENIZER] += b" "

    with FaultServer(SMALL, Fault(path="tokenizer.json", do=write)) as server:
        with pytest.raises(ModelError, match="changes while it is looked at"):
            fetched(server, tmp_path)


START = """
import sys
from hotstart.checkpoint.remote import fetch_small_files, open_store
print(fetch_small_files(open_store(sys.argv[1], environ={}, patience=5.0), sys.argv[2]))
"""


def test_many_starts_at_once_share_one_generation(tmp_path: Path) -> None:
    together = threading.Barrier(4)
    # All have looked twice before any of them writes.
    wait = Fault(path="merges.txt", do=lambda server: together.wait(30) and None)
    with FaultServer(SMALL, wait) as server:
        command = [sys.executable, "-c", START, f"{server.url}/m", str(tmp_path)]
        starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        paths = {start.communicate(timeout=60)[0].strip() for start in starts}
        assert [start.returncode for start in starts] == [0] * 4
        assert len(paths) == 1
        assert content(Path(paths.pop())) == SMALL


@pytest.mark.parametrize("harm", ["truncated", "removed", "manifest"])
def test_what_is_damaged_in_the_cache_is_fetched_again(tmp_path: Path, harm: str) -> None:
    with FaultServer(SMALL) as server:
        first = fetched(server, tmp_path)
        if harm == "truncated":
            (first / "tokenizer.json").write_bytes(b"{")
        elif harm == "removed":
            (first / "config.json").unlink()
        else:
            (first / ".generation.json").write_text("not JSON")
        assert content(fetched(server, tmp_path)) == SMALL


def test_generations_that_nobody_used_for_a_week_go(tmp_path: Path) -> None:
    with FaultServer(SMALL) as server:
        old = fetched(server, tmp_path)
        server.files[TOKENIZER] += b" "
        recent = fetched(server, tmp_path)
        os.utime(old, (time.time() - EIGHT_DAYS,) * 2)
        server.files[TOKENIZER] += b" "
        fetched(server, tmp_path)
        assert not old.exists()
        assert recent.exists()


def test_a_generation_in_use_stays_however_old(tmp_path: Path) -> None:
    with FaultServer(SMALL) as server:
        kept = fetched(server, tmp_path)
        os.utime(kept, (time.time() - EIGHT_DAYS,) * 2)
        assert fetched(server, tmp_path) == kept
        server.files[TOKENIZER] += b" "
        fetched(server, tmp_path)
        assert kept.exists()


def test_a_file_too_large_to_be_one_is_refused(tmp_path: Path) -> None:
    huge = {"Content-Range": f"bytes 0-{4 * 2**20 - 1}/{2**40}"}
    big = Fault(path="chat_template.jinja", headers=dict(huge))
    with FaultServer({**SMALL, "m/chat_template.jinja": bytes(4 << 20)}, big) as server:
        with pytest.raises(ModelError, match=r"chat_template\.jinja has .*; expected at most"):
            fetched(server, tmp_path)


def test_a_store_that_denies_what_does_not_exist_is_understood(tmp_path: Path) -> None:
    denied = Fault(path="vocab.json", status=403, body=b"<Error><Code>AccessDenied</Code></Error>")
    with FaultServer(SMALL, denied) as server:
        assert content(fetched(server, tmp_path)) == SMALL


def test_a_store_that_denies_the_model_is_named(tmp_path: Path) -> None:
    denied = Fault(status=403, body=b"<Error><Code>AccessDenied</Code><Message>No.</Message></Error>")
    with FaultServer(SMALL, denied) as server:
        with pytest.raises(StorageError, match="403 AccessDenied: No"):
            fetched(server, tmp_path)


@pytest.mark.parametrize("cache", ["none", "unwritable"])
def test_without_a_cache_the_small_files_lie_in_a_temporary_directory(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name in ("tmp", "working"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "working")
    with FaultServer(SMALL) as server:
        store = open_store(f"{server.url}/m", environ={}, patience=5.0)
        small = fetch_small_files(store, "" if cache == "none" else str(tmp_path / "file" / "cache"))
        store.close()
    assert content(Path(small)) == SMALL
    assert Path(small).parent == tmp_path / "tmp"
    assert list((tmp_path / "working").iterdir()) == []


def test_without_a_cache_the_small_files_go_with_the_process(tmp_path: Path) -> None:
    killed = START + "import os; sys.stdout.flush(); os.kill(os.getpid(), 9)"
    with FaultServer(SMALL) as server:

        def start(text: str) -> Path:
            command = [sys.executable, "-c", text, f"{server.url}/m", ""]
            environ = {**os.environ, "TMPDIR": str(tmp_path)}
            return Path(
                subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True).stdout.strip()
            )

        assert start(killed).parent == tmp_path
        assert start(START).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with FaultServer({}) as server, pytest.raises(ModelError, match=r"no config\.json"):
        fetched(server, tmp_path)


def test_a_short_answer_is_asked_for_again(tmp_path: Path) -> None:
    with FaultServer(SMALL, Fault(path="tokenizer.json", nth=1, cut=5)) as server:
        assert content(fetched(server, tmp_path)) == SMALL


def test_an_answer_that_stops_in_the_middle_is_asked_for_again(tmp_path: Path) -> None:
    with FaultServer(SMALL, Fault(path="tokenizer.json", nth=1, stall=5)) as server:
        store = open_store(f"{server.url}/m", environ={}, patience=1.0)
        assert content(Path(fetch_small_files(store, str(tmp_path)))) == SMALL
        store.close()


@pytest.mark.parametrize(
    "fault", [{"cut": 5}, {"stall": 5}, {"headers": {"Content-Range": "bytes 5-9/90"}}], ids=str
)
def test_an_answer_that_always_stops_at_the_same_byte_is_given_up(
    fault: dict[str, Any], tmp_path: Path
) -> None:
    with FaultServer(SMALL, Fault(path="tokenizer.json", **fault)) as server:
        store = open_store(f"{server.url}/m", environ={}, patience=0.5)
        with pytest.raises(StorageError, match=r"m/tokenizer\.json"):
            fetch_small_files(store, str(tmp_path))
        store.close()


def test_an_index_names_the_files_and_nothing_is_listed(tmp_path: Path) -> None:
    files = of_folder(write_model(tmp_path / "model", shards=3))
    with FaultServer(files) as server:
        small = fetched(server, tmp_path / "cache")
        store = open_store(f"{server.url}/m", environ={}, patience=5.0)
        checkpoint = open_checkpoint(ObjectFolder(store, str(small)))
        store.close()
        assert sum(file.size for file in checkpoint.files) == sum(
            len(data) for name, data in files.items() if name.endswith(".safetensors")
        )
        assert server.gets.count("/m/") == 0


def test_without_an_index_the_one_file_is_asked_for_by_name_once(tmp_path: Path) -> None:
    files = of_folder(write_model(tmp_path / "model", shards=1))
    with FaultServer(files) as server:
        small = fetched(server, tmp_path / "cache")
        store = open_store(f"{server.url}/m", environ={}, patience=5.0)
        checkpoint = open_checkpoint(ObjectFolder(store, str(small)))
        store.close()
        assert [os.path.basename(file.path) for file in checkpoint.files] == ["model.safetensors"]
        assert server.gets.count("/m/model.safetensors") == 1


def test_a_web_server_with_neither_index_nor_the_one_file_says_what_is_needed(tmp_path: Path) -> None:
    with FaultServer({CONFIG: json.dumps({}).encode()}) as server:
        small = fetched(server, tmp_path)
        store = open_store(f"{server.url}/m", environ={}, patience=5.0)
        with pytest.raises(ModelError, match=r"neither model\.safetensors\.index\.json nor model\.safe"):
            open_checkpoint(ObjectFolder(store, str(small)))
        store.close()


def test_shards_that_a_web_server_does_not_have_are_told_as_its_own(tmp_path: Path) -> None:
    files = of_folder(write_model(tmp_path / "model", shards=3))
    absent = sorted(name for name in files if name.endswith(".safetensors"))[1:]
    for name in absent:
        del files[name]
    with FaultServer(files) as server:
        small = fetched(server, tmp_path / "cache")
        store = open_store(f"{server.url}/m", environ={}, patience=5.0)
        with pytest.raises(
            ModelError, match=r"names 2 absent files \(.*\); files there hold \d+ of 21"
        ) as caught:
            open_checkpoint(ObjectFolder(store, str(small)))
        store.close()
    assert str(tmp_path) not in str(caught.value)
    assert "on disk" not in str(caught.value)
