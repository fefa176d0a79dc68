"""The page of a start: what its viewers are sent, and what a browser makes of it while a load is held up."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_models
from browser import Browser
from checkpoint_files import write_model
from fault_proxy import Fault, FaultServer, until
from hotstart.errors import StorageError
from hotstart.frontend import startup_page
from hotstart.messages import PhaseEvent
from hotstart.timeline import Phase
from running_server import RunningServer

from .conftest import Launch, Running
from .fake_engine import PATIENCE

Event = tuple[str, dict[str, Any]]


@contextmanager
def watched(server: Running) -> Iterator[Iterator[Event]]:
    """The events of one viewer: kind and content."""

    def events(response: httpx.Response) -> Iterator[Event]:
        kind = "message"
        for line in response.iter_lines():
            if line.startswith("event: "):
                kind = line[len("event: ") :]
            elif line.startswith("data: "):
                yield kind, json.loads(line[len("data: ") :])

    with server.client() as client, client.stream("GET", "/startup/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield events(response)


def reading(server: Running, done: int, *, name: str = "read weights", detail: str = "", **more: Any) -> None:
    """The engine has so many of a thousand bytes."""
    start = server.timeline.origin + 1
    phase = Phase(name=name, process="engine", start=start, bytes=done, total=1000, detail=detail, **more)
    server.engine.send(PhaseEvent(phase))


def phases(event: Event) -> dict[str, dict[str, Any]]:
    return {phase["name"]: phase for phase in event[1]["phases"]}


def test_a_viewer_gets_everything_then_what_changes_then_the_end(launch: Launch) -> None:
    server = launch()
    reading(server, 0, name="import torch")
    with watched(server) as events:
        first = next(event for event in events if "import torch" in phases(event))
        reading(server, 400)
        second = next(event for event in events if phases(event))
        server.make_ready()
        *_, last = events
    assert second[0] == "message"
    assert second[1]["state"] == "loading"
    assert list(phases(second)) == ["read weights"]
    assert phases(second)["read weights"]["bytes"] == 400
    assert (last[0], last[1]["state"]) == ("end", "ready")
    assert last[1]["ready"] >= first[1]["now"]
    assert last[1]["facts"]["device"] == "cpu, float32"


def test_who_comes_when_it_is_over_sees_the_whole_start_in_one_event(server: Running) -> None:
    reading(server, 1000, name="read weights", end=server.timeline.origin + 3)
    with watched(server) as events:
        (kind, news) = event = next(events)
        assert list(events) == []
    assert (kind, news["whole"], news["state"]) == ("end", True, "ready")
    assert phases(event)["read weights"]["end"] == pytest.approx(3)


def test_what_changes_faster_than_a_person_sees_is_one_event(launch: Launch) -> None:
    server = launch()
    with watched(server) as events:
        next(events)
        for done in range(1, 1001):
            reading(server, done)
        seen = []
        for event in events:
            if phases(event):
                seen.append(phases(event)["read weights"]["bytes"])
                if seen[-1] == 1000:
                    break
    assert seen == sorted(seen)
    assert len(seen) < 100


def test_a_failed_start_is_told_with_its_reason(launch: Launch) -> None:
    server = launch()
    with watched(server) as events:
        next(events)
        server.engine.fail(StorageError("/mnt/models/a.safetensors cannot be read"))
        *_, (kind, news) = events
    assert (kind, news["state"], news["ready"]) == ("end", "failed", None)
    assert news["failed"] == ["/mnt/models/a.safetensors cannot be read."]
    assert server.exit_code() == StorageError.exit_code


def test_strangers_see_the_name_of_the_model_and_no_path(launch: Launch) -> None:
    """No key is asked for here, as in the probes."""
    server = launch(http={"api_key": ("secret",)}, model={"model": "/mnt/models/tiny"})
    reading(server, 400, detail="buffered (fuse mounted at /mnt/models gets large reads), x2")
    reading(server, 1, name="other", detail="/mnt/models/other")
    with watched(server) as events, server.client() as client:
        first = next(event for event in events if "other" in phases(event))
        page = client.get("/startup")
        server.engine.fail(StorageError("/mnt/models/a.safetensors cannot be read"))
        *_, last = events
    assert page.status_code == 200
    assert first[1]["model"] == "tiny"
    assert phases(first)["other"]["note"] == ""
    assert last[1]["failed"] == ["A storage error: the server's log says which."]
    for text in (page.text, json.dumps(first), json.dumps(last)):
        assert "/mnt" not in text
        assert "secret" not in text


def test_a_viewer_that_takes_nothing_is_cut_off_and_holds_nobody_up(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_page, "_HANGS", 0.2)
    server = launch()
    reading(server, 1, name="long" * 4_000_000)  # more than the buffers between the two hold
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as hanging, watched(server) as events:
        hanging.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        hanging.settimeout(PATIENCE)
        hanging.connect((host, int(port)))
        hanging.sendall(b"GET /startup/events HTTP/1.1\r\nHost: x\r\n\r\n")
        assert hanging.recv(12) == b"HTTP/1.1 200"
        next(events)
        reading(server, 400)
        assert "read weights" in phases(next(event for event in events if phases(event)))
        server.make_ready()
        *_, last = events
        assert last[0] == "end"
        until(lambda: closed_by_server(hanging))
        taken = 0
        with suppress(ConnectionResetError):
            while data := hanging.recv(1 << 16):
                taken += len(data)
    assert taken < 16_000_000


def closed_by_server(connection: socket.socket) -> bool:
    """Whether the other end, which is this process's too, is no longer an open connection."""
    ports = f":{connection.getpeername()[1]:04X}", f":{connection.getsockname()[1]:04X}"
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    states = [words[3] for words in map(str.split, lines) if words[1][-5:] + words[2][-5:] == "".join(ports)]
    return "01" not in states


def test_asking_for_the_head_of_the_events_ends(launch: Launch) -> None:
    server = launch()
    with server.client() as client:
        assert client.head("/startup/events").headers["cache-control"] == "no-cache"
        assert client.head("/startup").status_code == 200


def test_the_page_is_small_runs_only_its_own_script_and_loads_nothing(server: Running) -> None:
    with server.client() as client:
        page = client.get("/startup")
    assert len(page.content) < 15_000
    policy = page.headers["content-security-policy"]
    for tag in ("script", "style"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.S)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert set(re.findall(r"https?://[^\s\"']+", page.text)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page.text)) == {
        "data:,",
        "startup.json",
        "livez",
        "metrics",
    }


def test_without_scripts_the_page_is_text_that_renews_itself(launch: Launch) -> None:
    server = launch(model={"served_model_name": ("<tiny> & more",)})
    reading(server, 400)
    with watched(server) as events:
        next(event for event in events if "read weights" in phases(event))
    with server.client() as client:
        loading = client.get("/startup").text
        server.make_ready()
        ready = client.get("/startup").text
    assert re.search(r"read weights +for .+, 400 B of 1.00 kB, ", unescape(loading))
    assert "&lt;tiny&gt; &amp; more" in loading
    assert "<tiny>" not in loading
    assert 'http-equiv="refresh"' in loading
    assert "ready after" in ready
    assert 'http-equiv="refresh"' not in ready


def test_a_start_that_nobody_looks_at_does_not_import_the_page() -> None:
    code = "import sys, hotstart.frontend.server; print('hotstart.frontend.startup_page' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """13 MB in two shards."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
    write_model(tmp_path / "model", vocab_size=tiny_models.VOCAB, **shape)
    tiny_models.write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def test_a_browser_shows_the_bars_of_a_slow_load_and_the_waterfall_when_it_is_done(
    model: Path, tmp_path: Path
) -> None:
    """The second shard comes when the page has shown the first."""
    files = {f"m/{file.name}": file.read_bytes() for file in model.iterdir()}
    shown = threading.Event()
    # Headers come in answers of a megabyte at most.
    slow = Fault(path="00002-of", if_range=lambda begin, end: end - begin > 1 << 20)
    slow.do = lambda _: shown.wait(PATIENCE) and None  # type: ignore[func-returns-value]
    with Browser(tmp_path) as browser, FaultServer(files, slow) as web:
        with RunningServer(f"{web.url}/m", log=tmp_path / "log") as server:
            server.until(lambda: server.get_status("/livez") == 200)
            browser.open(f"http://127.0.0.1:{server.port}/startup")
            row = "[...rows.values()].find(row => row.phase.name === 'read weights')"
            browser.until(lambda: browser.run(f"const row = {row}; return row && row.phase.bytes > 0"))
            browser.screenshot(tmp_path / "loading.png")
            words = browser.text("#phases")
            width = browser.run(f"return {row}.bar.style.width")
            assert re.search(r"read weights\n[\d.]+ MB of 13.1 MB", words), words
            assert 0 < float(width.rstrip("%")) < 100
            assert browser.text("#state").startswith("starting · ")
            shown.set()
            browser.until(lambda: "ready after" in browser.text("#state"))
            browser.screenshot(tmp_path / "ready.png")
            bars = browser.run("return document.querySelectorAll('#fall rect').length")
            assert bars == len(server.http.get("/startup.json").json()["phases"])
            assert browser.run("return document.querySelector('#phases').hidden")
            assert "read weights" in browser.text("#done")
            browser.resize(400, 800)
            wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            assert not browser.run(f"return {wide}")
            assert browser.log() == []
