"""``hotstart serve`` from spawn to end, with real processes and a tiny model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_faults import TORCH_AFTER_READS, engine_fault
from hub_stand_in import Hub
from hub_stand_in import serve as serve_hub
from running_server import DEADLINE, RunningServer, alive, load_json, run_to_end, until_gone

Model = Callable[..., Path]


@pytest.fixture(scope="module")
def server(tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with RunningServer(tiny_model(), log=log) as running:
        yield running.until_ready()


def test_a_request_that_comes_early_is_held_and_becomes_the_first_step(
    tiny_model: Model, tmp_path: Path
) -> None:
    with RunningServer(tiny_model(), log=tmp_path / "log") as server:
        server.until(lambda: server.get_status("/livez") == 200)
        assert server.get_status("/v1/models") == 503
        assert server.get_status("/health") == 503
        assert server.complete()["usage"]["completion_tokens"] == 8
        assert server.get_status("/health") == 200
    assert "held request" in server.output


def test_a_server_that_nobody_asks_becomes_ready_by_a_probe(server: RunningServer) -> None:
    assert "probe" in server.output
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_the_timeline_is_logged_served_and_written(tiny_model: Model, tmp_path: Path) -> None:
    target = tmp_path / "startup.json"
    with RunningServer(tiny_model(), "--startup-json", str(target), log=tmp_path / "log") as server:
        server.until_ready()
        live = server.http.get("/startup.json").json()
        metrics = server.http.get("/metrics").text
        server.until(target.exists)
    names = {phase["name"] for phase in load_json(target)["phases"]}
    assert {"import torch", "read weights", "build model", "first step", "check"} <= names
    assert {phase["name"] for phase in live["phases"]} >= names
    assert "hotstart:startup_phase_seconds" in metrics
    for name in names:
        assert name in server.output


def test_weights_are_read_while_torch_is_imported(tiny_model: Model, tmp_path: Path) -> None:
    """An import that cannot end before reads begin would never end if they waited for it."""
    env = engine_fault(tmp_path, TORCH_AFTER_READS, PATIENCE=str(DEADLINE / 2))
    flags = ("--read-strategy", "buffered", "--threads", "1")
    with RunningServer(tiny_model(), *flags, env=env, log=tmp_path / "log") as server:
        server.until_ready()
        phases = {phase["name"]: phase for phase in server.http.get("/startup.json").json()["phases"]}
    assert phases["read weights"]["start"] < phases["import torch"]["end"]


def test_the_same_text_alone_and_beside_others(server: RunningServer) -> None:
    prompts = [f"Prompt number {n} " * (n + 1) for n in range(6)]
    alone = [server.complete(p, max_tokens=24)["choices"][0]["text"] for p in prompts]
    together: dict[str, str] = {}

    def ask(prompt: str) -> None:
        together[prompt] = server.complete(prompt, max_tokens=24)["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[prompt] for prompt in prompts] == alone


def test_a_reset_forgets_the_prefixes_of_earlier_requests(server: RunningServer) -> None:
    def hits() -> float:
        """Prompt tokens found in the cache by one more request of the same prompt."""
        before = server.metric("vllm:prefix_cache_hits_total")
        server.complete("The same beginning. " * 8)
        return server.metric("vllm:prefix_cache_hits_total") - before

    hits()
    assert hits() > 0
    assert server.http.post("/reset_prefix_cache").status_code == 200
    assert hits() == 0


def test_what_it_serves_on_is_one_line(server: RunningServer) -> None:
    server.until(lambda: ": ready after " in server.output)
    (line,) = (line for line in server.output.splitlines() if "serving on cpu, " in line)
    assert "float32, context 512, at most " in line
    assert line.endswith("sequences and 2048 tokens a step")


def test_a_client_that_goes_away_frees_its_request(server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": "Go", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    server.until(lambda: server.metric("vllm:num_requests_running") == 0)
    server.until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)


def test_sigterm_lets_running_requests_finish(tiny_model: Model, tmp_path: Path) -> None:
    with RunningServer(tiny_model(), log=tmp_path / "log") as server:
        server.until_ready()
        texts: list[str] = []
        body = {"model": "tiny", "prompt": "Go", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            texts.append(next(lines))
            server.process.send_signal(signal.SIGTERM)
            texts += list(lines)
        assert texts[-1] == "data: [DONE]"
        assert json.loads(texts[-2][6:])["choices"][0]["finish_reason"] == "length"
        engine = server.engine_pid
        assert server.process.wait(60) == 0
        assert not engine or not alive(engine)


def test_sigterm_before_ready_ends_at_once_with_143(tiny_model: Model, tmp_path: Path) -> None:
    with RunningServer(tiny_model(), log=tmp_path / "log") as server:
        server.until(lambda: server.engine_pid != 0)
        engine = server.engine_pid
        assert server.terminate() in (143, -signal.SIGTERM)
        until_gone(engine)


@pytest.fixture
def slow_hub(tiny_model: Model) -> Iterator[Hub]:
    """A hub that answers everything but the weights, until the test is over."""
    files = {path.name: path.read_bytes() for path in tiny_model().iterdir()}
    with serve_hub(Hub("org/tiny", files)) as hub:
        hub.open.clear()
        yield hub


def test_sigterm_during_a_download_does_not_wait_for_the_hub(slow_hub: Hub, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": slow_hub.endpoint}
    with RunningServer(slow_hub.name, env=env, log=tmp_path / "log") as server:
        assert slow_hub.held.wait(DEADLINE)
        server.until(lambda: server.get_status("/livez") == 200)
        engine = server.engine_pid
        assert server.terminate() == 143
        assert not alive(engine)
        assert "Traceback" not in server.output


def test_a_start_that_fails_during_a_download_does_not_wait_for_the_hub(
    slow_hub: Hub, tmp_path: Path
) -> None:
    env = {"HF_ENDPOINT": slow_hub.endpoint}
    with RunningServer(slow_hub.name, env=env, log=tmp_path / "log") as server:
        assert slow_hub.held.wait(DEADLINE)
        server.until(lambda: server.get_status("/livez") == 200)
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.process.wait(DEADLINE) == 6
    assert "SIGKILL" in server.output.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_cause_of_a_dead_engine_is_in_the_last_lines(
    tiny_model: Model, tmp_path: Path, number: signal.Signals
) -> None:
    with RunningServer(tiny_model(), log=tmp_path / "log") as server:
        server.until_ready()
        os.kill(server.engine_pid, number)
        assert server.process.wait(60) == 6
    last = "\n".join(server.output.splitlines()[-5:])
    assert number.name in last
    assert "Traceback" not in last


def test_an_engine_that_dies_while_loading_is_named(tiny_model: Model, tmp_path: Path) -> None:
    with RunningServer(tiny_model(), log=tmp_path / "log") as server:
        server.until(lambda: server.engine_pid != 0)
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.process.wait(60) == 6
    assert "SIGKILL" in "\n".join(server.output.splitlines()[-5:])


def test_kills_at_random_moments_leave_nothing_behind(tiny_model: Model) -> None:
    script = Path(__file__).parents[2] / "scripts" / "kill_storm.py"
    command = [sys.executable, str(script), "--kills", "16", "--seed", "7", "--model", str(tiny_model())]
    storm = subprocess.run(command, capture_output=True, text=True, timeout=5 * DEADLINE)
    assert storm.returncode == 0, storm.stdout + storm.stderr
    assert ", 0 problems" in storm.stdout
    assert storm.stdout.count("    1 × ") == 16, "each moment, victim and signal once"


def test_a_taken_port_fails_before_anything_is_read(tiny_model: Model, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, output = run_to_end(tiny_model(), port=port)
    assert code == 2
    assert f"127.0.0.1:{port} is taken by" in output
    assert f"pid {os.getpid()}" in output
    assert "Traceback" not in output


def test_a_failed_check_ends_both_processes(tmp_path: Path) -> None:
    code, output = run_to_end(tmp_path / "nowhere")
    assert code == 3
    assert "nowhere" in output
    assert "Traceback" not in output


def test_a_unix_socket_serves_and_is_replaced_after_a_kill(tiny_model: Model, tmp_path: Path) -> None:
    path = tmp_path / "hotstart.sock"
    for turn in range(2):
        with RunningServer(tiny_model(), "--uds", str(path), log=tmp_path / f"log{turn}") as server:
            server.until(lambda: _listens(path))
            server.until_ready()


@pytest.mark.parametrize("ready", [False, True])
def test_a_unix_socket_is_taken_away_at_the_end(tiny_model: Model, tmp_path: Path, ready: bool) -> None:
    path = tmp_path / "hotstart.sock"
    with RunningServer(tiny_model(), "--uds", str(path), log=tmp_path / "log") as server:
        server.until(lambda: ": ready after " in server.output if ready else _listens(path))
        assert server.terminate() in ((0,) if ready else (143,))
    assert not path.exists()


def test_the_unix_socket_of_a_successor_stays(tiny_model: Model, tmp_path: Path) -> None:
    path = tmp_path / "hotstart.sock"
    with RunningServer(tiny_model(), "--uds", str(path), log=tmp_path / "log") as server:
        server.until(lambda: _listens(path))
        path.unlink()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(path))
            server.terminate()
    assert path.exists()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
