"""Start servers, kill either process at random moments, and look for what is left behind.

``kill_storm.py --kills 200`` prints a summary and exits with 1 when anything was: a process, the
name of a unix socket, shared memory, a temporary file, a traceback, a wrong exit code. One name may
stay: that of a frontend killed by SIGKILL, which can tidy up nothing; the next start takes it over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import httpx  # noqa: E402

from running_server import DEADLINE, RunningServer, alive  # noqa: E402

MARK = "KILL_STORM"
"""A variable that every process of a turn inherits, so that none can hide."""
MOMENTS = ("starting", "loading", "ready", "streaming")
ENGINE_DIED = 6


@dataclass(frozen=True)
class Plan:
    """One start and its end. ``pause`` is in seconds, from the beginning of the moment."""

    moment: str
    victim: str
    signal: signal.Signals
    unix: bool
    pause: float

    def __str__(self) -> str:
        return f"{self.signal.name} to the {self.victim}, {self.moment}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a model's directory; default: a tiny random one")
    args = parser.parse_args()
    began, found = time.monotonic(), 0
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="kill-storm-") as name:
        folder = Path(name)
        model = args.model or tiny_model(folder / "model")
        storm = Storm(model, folder)
        for plan in plans(args.kills, args.seed):
            problems = storm.run(plan)
            done[str(plan)] += 1
            found += len(problems)
            for problem in problems:
                print(f"turn {storm.turn} ({plan}): {problem}", flush=True)
    for what, times in sorted(done.items()):
        print(f"{times:5} × {what}")
    print(f"{args.kills} kills in {time.monotonic() - began:.0f} s, {found} problems")
    return 1 if found else 0


def tiny_model(directory: Path) -> Path:
    import tiny_models

    return tiny_models.write("llama", directory, dtype="float32", shards=1)


def plans(kills: int, seed: int) -> Iterator[Plan]:
    """Every combination in turn, so that few kills are as varied as they can be; the moments random."""
    rng = random.Random(seed)
    kinds = [
        (moment, victim, number)
        for number in (signal.SIGKILL, signal.SIGTERM)
        for victim in ("frontend", "engine")
        for moment in MOMENTS
    ]
    for turn in range(kills):
        if turn % len(kinds) == 0:
            rng.shuffle(kinds)
        moment, victim, number = kinds[turn % len(kinds)]
        longest = {"starting": 0.3, "loading": 1.5, "ready": 0.7, "streaming": 0.2}[moment]
        yield Plan(moment, victim, number, turn % 2 == 1, rng.uniform(0, longest))


class Storm:
    """Turns that share a folder, and so the name of the unix socket and every cache."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.turn = 0
        self._model = model
        self._folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._socket = folder / "hotstart.sock"

    def run(self, plan: Plan) -> list[str]:
        """Carry ``plan`` out; returns what was wrong afterwards."""
        self.turn += 1
        mark = f"{os.getpid()}-{self.turn}"
        shared = shared_memory()
        flags = ["--threads", "1", *(["--uds", str(self._socket)] if plan.unix else [])]
        env = {MARK: mark, "TMPDIR": str(self._temporary)}
        log = self._folder / f"log{self.turn}"
        with RunningServer(self._model, *flags, env=env, log=log) as server:
            try:
                killed_ready = strike(server, plan)
                code = server.process.wait(DEADLINE)
            except AssertionError as error:
                raise SystemExit(f"turn {self.turn} ({plan}): {error}\n{server.output}") from error
        problems = [f"exit code {code}"] if code not in expected_codes(plan, killed_ready) else []
        problems += [f"process {pid} lives on" for pid in survivors(mark)]
        if self._socket.exists() and not (plan.victim == "frontend" and plan.signal is signal.SIGKILL):
            if plan.unix:
                problems.append(f"{self._socket.name} is left")
            self._socket.unlink()
        problems += [f"/dev/shm/{name} is left" for name in left(shared)]
        problems += [f"{path.name} is left in TMPDIR" for path in self._temporary.iterdir()]
        problems += [f"{path} is left" for path in (self._folder / "cache").rglob(".probe-*")]
        if "Traceback" in server.output or "defect" in server.output:
            problems.append(f"a traceback:\n{server.output}")
        log.unlink()
        return problems


def strike(server: RunningServer, plan: Plan) -> bool:
    """Bring ``server`` to the moment, and kill; whether it was ready then."""
    server.until(lambda: server.engine_pid != 0)
    engine = server.engine_pid
    if plan.moment == "loading":
        server.until(lambda: server.get_status("/livez") != 0)
    elif plan.moment != "starting":
        server.until_ready()
    if plan.moment == "streaming":
        stream(server)
    threading.Event().wait(plan.pause)
    ready = server.get_status("/health") == 200
    victim = server.process.pid if plan.victim == "frontend" else engine
    with suppress(ProcessLookupError):
        os.kill(victim, plan.signal)
    if plan.victim == "engine" and plan.signal is signal.SIGTERM:
        # Signals to a whole group must not cut requests off: the engine goes on, and the frontend ends it.
        server.until_ready().complete()
        server.process.send_signal(signal.SIGTERM)
        ready = True
    return ready


def stream(server: RunningServer) -> None:
    """Start two endless answers, each on a thread; returns when text has come from both."""
    body = {"model": "tiny", "prompt": "Go", "max_tokens": 400, "ignore_eos": True, "stream": True}
    flowing = [threading.Event(), threading.Event()]

    def read(began: threading.Event) -> None:
        with suppress(httpx.HTTPError), server.http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    began.set()

    for began in flowing:
        threading.Thread(target=read, args=(began,), daemon=True).start()
    server.until(lambda: all(began.is_set() for began in flowing))


def expected_codes(plan: Plan, ready: bool) -> tuple[int, ...]:
    """What the server may end with: between the last look and the kill it may have become ready."""
    if plan.victim == "engine" and plan.signal is signal.SIGKILL:
        return (ENGINE_DIED,)
    if plan.signal is signal.SIGKILL:
        return (-signal.SIGKILL,)
    # Before its first lines run, Python has not taken the signal yet.
    return (0,) if ready else (0, 128 + signal.SIGTERM, -signal.SIGTERM)


def survivors(mark: str) -> list[int]:
    """Processes of a turn that are still there when they had time to end."""
    deadline = time.monotonic() + DEADLINE
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


def marked(mark: str) -> list[int]:
    """Living processes that carry the mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if alive(pid)]


def left(before: set[str]) -> set[str]:
    """Names in /dev/shm since ``before`` that do not go away: those of other programs come and go."""
    deadline = time.monotonic() + DEADLINE
    while (found := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    try:
        return set(os.listdir("/dev/shm"))
    except OSError:
        return set()


if __name__ == "__main__":
    sys.exit(main())
