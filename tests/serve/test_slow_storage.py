"""A storage that is slow, stands still, or changes under the server: what clients, probes and logs see."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import hub_stand_in
from engine_faults import SLOW_READS, engine_fault
from hotstart.frontend.liveness import Liveness
from hotstart.frontend.startup import Startup
from hotstart.timeline import Timeline
from running_server import RunningServer

Model = Callable[..., Path]
READ = ("--read-strategy", "buffered")


def livez(server: RunningServer) -> tuple[int, dict[str, Any]]:
    response = server.http.get("/livez")
    return response.status_code, response.json()


def test_a_slow_start_is_alive_reports_bytes_holds_requests_and_is_never_silent(
    large_model: Path, tmp_path: Path
) -> None:
    """It takes several times the stall time: what counts is that something moves."""
    env = engine_fault(tmp_path, SLOW_READS, BYTES_PER_SECOND="700000")
    flags = (*READ, "--stall-timeout", "4")
    answers: list[dict[str, Any]] = []
    seen: list[tuple[int, dict[str, Any]]] = []
    with RunningServer(large_model, *flags, env=env, log=tmp_path / "log") as server:
        server.until(lambda: server.get_status("/livez") == 200)
        asking = threading.Thread(target=lambda: answers.append(server.complete()))
        asking.start()

        def ready() -> bool:
            seen.append(livez(server))
            return server.get_status("/health") == 200

        server.until(ready)
        asking.join()
    assert {status for status, _ in seen} == {200}
    reading = [body for _, body in seen if body["phase"] == "read weights"]
    done = [body["bytes"] for body in reading]
    assert done == sorted(done)
    assert len(set(done)) > 5
    assert any(body["percent"] and 0 < body["percent"] < 100 and body["seconds_left"] for body in reading)
    assert reading[-1]["elapsed"] > 8
    assert answers[0]["usage"]["completion_tokens"] == 8
    assert "held request" in server.output
    assert "No progress" not in server.output
    assert re.search(r"read weights: \d+ %, .+ of 13.1 MB, .+/s, .+ left", server.output)
    assert longest_silence(server.output) < 7


def longest_silence(output: str) -> float:
    """Seconds between two lines of a log that no terminal reads: whole lines, nothing overwritten."""
    assert "\r" not in output
    assert "\x1b" not in output
    assert output.endswith("\n")
    written = re.findall(r"^\d\d-\d\d ([\d:]{8}\.\d{3})", output, re.M)
    stamps = [datetime.strptime(text, "%H:%M:%S.%f") for text in written]
    return max((b - a).total_seconds() % 86400 for a, b in pairwise(stamps))


def test_a_storage_that_stops_giving_bytes_is_noticed_named_and_forgiven(
    large_model: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    fault = {"BYTES_PER_SECOND": "1e9", "STOP_AFTER": "5e6", "GO_ON": str(go)}
    env = engine_fault(tmp_path, SLOW_READS, **fault)
    with RunningServer(large_model, *READ, "--stall-timeout", "1", env=env, log=tmp_path / "log") as server:
        server.until(lambda: server.get_status("/livez") == 200)
        server.until(lambda: (seen := livez(server))[0] == 503 and "read weights" in seen[1]["message"])
        _, body = livez(server)
        assert body["status"] == "stalled"
        assert re.fullmatch(r"No progress for \d+ s in the phase read weights\.", body["message"])
        server.until(lambda: re.search(r"WARN .* No progress for \d+ s in the phase read", server.output))
        assert server.get_status("/health") == 503
        go.touch()
        server.until_ready()
        assert livez(server)[0] == 200
        server.until(lambda: "the start moves again" in server.output)


def test_an_engine_that_computes_is_not_stalled_where_no_bytes_are_counted() -> None:
    now, cpu = [0.0], [0.0]
    timeline = Timeline("frontend", origin=0.0)
    liveness = Liveness(Startup(), timeline, stall=60, cpu_seconds=lambda: cpu[0], clock=lambda: now[0])
    step = timeline.begin("first step", start=0.0)
    for _ in range(10):
        now[0] += 50
        cpu[0] += 1
        assert liveness.report().status == "loading"
    now[0] += 61
    assert liveness.report().status == "stalled"
    timeline.end(step, at=now[0])
    timeline.begin("read weights", total=1000, start=now[0])
    now[0] += 61
    cpu[0] += 30
    assert liveness.report().status == "stalled"


def test_a_phase_with_all_its_bytes_is_not_what_a_start_stands_still_in() -> None:
    """The weights have arrived and torch is still being imported: the engine computes, so it is alive."""
    now, cpu = [0.0], [0.0]
    timeline = Timeline("engine", origin=0.0)
    liveness = Liveness(Startup(), timeline, stall=60, cpu_seconds=lambda: cpu[0], clock=lambda: now[0])
    timeline.begin("import torch", start=0.5)
    timeline.progress(timeline.begin("read weights", total=1000, start=1.0), 1000)
    for _ in range(5):
        now[0] += 50
        cpu[0] += 1
        report = liveness.report()
        assert (report.status, report.phase, report.percent) == ("loading", "import torch", None)
    now[0] += 61
    assert liveness.report().message == "No progress for 61 s in the phase import torch."


def test_a_download_is_a_phase_that_counts_its_bytes(tiny_model: Model, tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in tiny_model().iterdir()}
    with hub_stand_in.serve(hub_stand_in.Hub("org/tiny", files)) as hub:
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        with RunningServer("org/tiny", env=env, log=tmp_path / "log") as server:
            server.until_ready()
            phases = {phase["name"]: phase for phase in server.http.get("/startup.json").json()["phases"]}
    assert phases["download"]["bytes"] >= len(files["model.safetensors"])
    assert phases["check"]["start"] >= phases["download"]["end"]


def test_a_weight_file_that_shrinks_under_the_server_is_named_with_both_sizes(
    tiny_model: Model, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    shard = model / "model.safetensors"
    size = shard.stat().st_size
    with RunningServer(model, "--read-strategy", "map", log=tmp_path / "log") as server:
        server.until_ready()
        os.truncate(shard, 5000)
        answer = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "Hello"})
        assert server.process.wait(60) == 4
    said = f"{shard} shrank from {size} to 5000 bytes"
    assert said in "\n".join(server.output.splitlines()[-2:])
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (500, True)
