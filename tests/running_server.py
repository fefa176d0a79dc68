"""A real ``hotstart serve`` as a child process, for tests of the whole."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

DEADLINE = 60.0
"""Seconds that anything may take on a busy machine before a test gives up."""


class RunningServer:
    """``with RunningServer(model) as server``: killed at the end, whatever happened."""

    def __init__(self, model: Path | str, *flags: str, env: dict[str, str] | None = None, log: Path) -> None:
        self.port = free_port()
        self.log = log
        self._file = log.open("wb")
        self.process = subprocess.Popen(
            command(model, self.port, "--served-model-name", "tiny", *flags),
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HOTSTART_CACHE_ROOT": str(log.parent / "cache"), **(env or {})},
        )
        unix = flags[flags.index("--uds") + 1] if "--uds" in flags else None
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=DEADLINE,
            transport=httpx.HTTPTransport(uds=unix),
        )

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE)
        self._file.close()

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    @property
    def engine_pid(self) -> int:
        """The engine's process id; 0 when there is none."""
        pids = children(self.process.pid)
        return pids[0] if pids else 0

    def until_ready(self) -> RunningServer:
        """Wait for /health 200."""
        self.until(lambda: self.get_status("/health") == 200)
        return self

    def until(self, condition: Any) -> None:
        """Poll until true; fails when the server ends first."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None, f"server ended:\n{self.output}"
            assert time.monotonic() < deadline, f"timed out:\n{self.output}"
            time.sleep(0.01)

    def get_status(self, path: str) -> int:
        """HTTP status; 0 while nobody answers."""
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return 0

    def complete(self, prompt: str = "Hello", **fields: Any) -> dict[str, Any]:
        """The body of a completion that must succeed."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = self.http.post("/v1/completions", json={**body, **fields})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def metric(self, name: str) -> float:
        """The value of a metric without labels, or the sum over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{"))
        )

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE)


def run_to_end(
    model: Path | str, *flags: str, port: int = 0, env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and output of a start that is expected to end by itself, leaving nothing behind."""
    with subprocess.Popen(
        command(model, port or free_port(), *flags),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    ) as process:
        output, _ = process.communicate(timeout=DEADLINE)
    assert not engines_of(process.pid)
    return process.returncode, output


def engines_of(pid: int) -> list[int]:
    """Engine processes that a server spawned, wherever they hang in the process tree now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"hotstart.engine.main" in line and f", {pid})".encode() in line:
                found.append(int(entry.name))
    return found


def command(model: Path | str, port: int, *flags: str) -> list[str]:
    """The command line of a server on loopback, or on a unix socket if the flags say so."""
    start = [sys.executable, "-m", "hotstart", "serve", str(model), *flags]
    return start if "--uds" in flags else [*start, "--host", "127.0.0.1", "--port", str(port)]


def free_port() -> int:
    """A port that the kernel gives to nobody else for a minute.

    A connection that this side closed leaves it in TIME_WAIT: a server that asks for it by number, with
    SO_REUSEADDR, as servers do, gets it; whoever asks for any port, such as a test in the next process,
    does not.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.close()
        client.recv(1)
        return int(listener.getsockname()[1])


def children(pid: int) -> list[int]:
    """Living child processes."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_gone(pid: int) -> None:
    """Wait until a process has ended."""
    deadline = time.monotonic() + DEADLINE
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.005)


def load_json(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())
