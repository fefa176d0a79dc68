"""What an operator reads: the last lines of a death, JSON for collectors, a terminal, the cache's size."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_faults import SLOW_READS, engine_fault
from running_server import RunningServer, alive, children, command, free_port, run_to_end

Model = Callable[..., Path]

BROKEN_TORCH = """
raise ImportError("libcudart.so.99: cannot open shared object file: No such file or directory")
"""
RAISE_ON_LOAD = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "hotstart.engine.scheduler":
            raise ZeroDivisionError("a defect")
sys.meta_path.insert(0, Finder())
"""
WITH_LAST_WORDS = """
import os, sys
sys.stderr.write("free(): double free detected\\\\n")
sys.stderr.flush()
os.abort()
"""
DEATHS = {
    "exits without a word": ("os._exit(3)", "the engine exited with code 3 and printed nothing"),
    "crashes in native code": ("import ctypes; ctypes.string_at(0)", "SIGSEGV (a crash in native code)"),
    "aborts with last words": (WITH_LAST_WORDS, "SIGABRT (native code gave up); the last it printed: free()"),
    "is killed": (
        "import signal; os.kill(os.getpid(), signal.SIGKILL)",
        "SIGKILL (probably the kernel's",
    ),
    "raises": (RAISE_ON_LOAD, "the engine failed: ZeroDivisionError: a defect"),
}


@pytest.mark.parametrize("how", DEATHS)
def test_the_last_lines_say_how_the_engine_died(how: str, tiny_model: Model, tmp_path: Path) -> None:
    code, cause = DEATHS[how]
    status, output = run_to_end(tiny_model(), env=engine_fault(tmp_path, code))
    assert status == 6
    last = output.splitlines()[-2:]
    assert any(line.startswith("hotstart: engine error: ") and cause in line for line in last)


def test_a_torch_that_cannot_be_imported_is_named(tiny_model: Model, tmp_path: Path) -> None:
    env = engine_fault(tmp_path, "")
    (tmp_path / "fault" / "torch").mkdir()
    (tmp_path / "fault" / "torch" / "__init__.py").write_text(BROKEN_TORCH)
    (tmp_path / "fault" / "torch" / "version.py").write_text("cuda = None\n")
    status, output = run_to_end(tiny_model(), "--device", "cpu", env=env)
    assert status == 6
    assert "torch could not be imported: ImportError: libcudart.so.99" in output
    assert "Check that `python -c 'import torch'` works" in output
    assert "Traceback" not in output


NOISE = """
import threading, sys, warnings
def speak():
    warnings.warn("something is deprecated")
    print("a library speaks", file=sys.stderr, flush=True)
threading.Timer(0.3, speak).start()
"""


def test_with_json_every_line_until_the_exit_is_an_object(tiny_model: Model, tmp_path: Path) -> None:
    env = engine_fault(tmp_path, NOISE)
    flags = ("--log-format", "json", "--enable-log-requests")
    with RunningServer(tiny_model(), *flags, env=env, log=tmp_path / "log") as server:
        server.until_ready().complete()
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.process.wait(60) == 6
    entries = [json.loads(line) for line in server.output.splitlines()]
    assert all({"timestamp", "level", "logger", "message"} <= entry.keys() for entry in entries)
    messages = [entry["message"] for entry in entries]
    assert any(message.startswith("ready after ") for message in messages)
    assert "a library speaks" in messages
    assert any("something is deprecated" in message for message in messages)
    assert (entries[-1]["level"], entries[-1]["exit_code"]) == ("error", 6)
    assert "SIGKILL" in messages[-1]


@pytest.mark.parametrize(
    ("flags", "code", "kind"),
    [(["--max-modle-len", "4"], 2, "configuration error"), ([], 3, "model error")],
)
def test_with_json_errors_of_the_start_are_objects(
    flags: list[str], code: int, kind: str, tmp_path: Path
) -> None:
    status, output = run_to_end(tmp_path / "absent", "--log-format", "json", *flags)
    assert status == code
    last = json.loads(output.splitlines()[-1])
    assert (last["kind"], last["exit_code"]) == (kind, code)
    for line in output.splitlines():
        assert isinstance(json.loads(line), dict)


def test_closed_streams_change_nothing(tmp_path: Path) -> None:
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*closing, *command(tmp_path / "absent", free_port())]).returncode == 3


def test_log_level_leaves_only_what_is_severe_enough(tiny_model: Model, tmp_path: Path) -> None:
    with RunningServer(tiny_model(), "--log-level", "error", log=tmp_path / "log") as server:
        server.until_ready()
        assert server.output == ""


BROKEN_DRIVER = """
from hotstart.device.choose import Machine
from hotstart.errors import DeviceError
def devices(self):
    raise DeviceError("cuInit failed: system driver mismatch", advice="Reload the module")
Machine.torch_has_cuda, Machine.devices = (lambda self: True), devices
"""


def test_device_and_dtype_are_logged_with_their_reasons(tiny_model: Model, tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--threads", "1", "--dtype", "bfloat16")
    with RunningServer(tiny_model(), *flags, log=tmp_path / "log") as server:
        server.until_ready()
    lines = [line for line in server.output.splitlines() if " engine: " in line]
    assert lines[0].endswith("device: CPU: --device cpu")
    assert re.search(r"dtype: bfloat16, by --dtype \(weights: .*B float32\)$", lines[1])


def test_gpu_that_cannot_be_used_is_a_warning_and_no_silent_cpu(tiny_model: Model, tmp_path: Path) -> None:
    env = engine_fault(tmp_path, BROKEN_DRIVER)
    with RunningServer(tiny_model(), "--log-level", "warning", env=env, log=tmp_path / "log") as server:
        server.until_ready()
    assert (
        "--device auto runs on the CPU: cuInit failed: system driver mismatch. Reload the mod"
        in server.output
    )


def test_weight_files_are_closed_once_the_server_is_idle(tiny_model: Model, tmp_path: Path) -> None:
    flags = ("--read-strategy", "buffered", "--threads", "1")
    with RunningServer(tiny_model(), *flags, log=tmp_path / "log") as server:
        server.until_ready()

        def open_weights() -> list[str]:
            links = Path(f"/proc/{server.engine_pid}/fd").iterdir()
            return [name for link in links if (name := os.readlink(link)).endswith(".safetensors")]

        server.until(lambda: not open_weights())
        assert server.complete()["choices"]


def test_a_printed_cache_size_is_taken_back_without_measuring(tiny_model: Model, tmp_path: Path) -> None:
    flags = ("--gpu-memory-utilization", "0.3")
    with RunningServer(tiny_model(), *flags, log=tmp_path / "first") as server:
        server.until_ready()
        server.until(lambda: "hotstart: ready" in server.output)
    [line] = re.findall(r"KV cache: (.*)\n", server.output)
    assert line.startswith("taken as tokens are written, up to ")
    assert len(line) < 140
    printed = line.split()[-1]
    assert re.fullmatch(r"--kv-cache-memory-bytes=\d+", printed)
    with RunningServer(tiny_model(), printed, log=tmp_path / "second") as server:
        server.until_ready()
        server.until(lambda: "hotstart: ready" in server.output)
    assert "as given by --kv-cache-memory-bytes; nothing was measured\n" in server.output


def test_a_cache_given_in_blocks_is_not_advised_to_be_given_in_bytes(
    tiny_model: Model, tmp_path: Path
) -> None:
    with RunningServer(tiny_model(), "--num-gpu-blocks-override", "64", log=tmp_path / "log") as server:
        server.until_ready()
        server.until(lambda: "hotstart: ready" in server.output)
    assert "as given by --num-gpu-blocks-override; nothing was measured\n" in server.output


def test_a_taken_port_is_refused_before_the_engine_has_begun(tiny_model: Model) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        status, output = run_to_end(tiny_model(), port=port)
    assert status == 2
    [error, advice] = output.splitlines()
    assert f"127.0.0.1:{port} is taken by" in error
    assert f"(pid {os.getpid()})" in error
    assert advice == "  Stop that process, or choose another port with --port."


def test_on_a_terminal_a_bar_moves_below_whole_lines(large_model: Path, tmp_path: Path) -> None:
    env = engine_fault(tmp_path, SLOW_READS + NOISE, BYTES_PER_SECOND="4e6", TERM="xterm")
    env["HOTSTART_CACHE_ROOT"] = str(tmp_path / "cache")
    ours, theirs = pty.openpty()  # of unknown size, as `docker run -t` may give it
    flags = ("--read-strategy", "buffered")
    server = subprocess.Popen(
        command(large_model, free_port(), *flags),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **env},
    )
    os.close(theirs)
    try:
        written = read_terminal(ours, until=re.compile(rb"hotstart: ready after .*\r\n"))
        [engine] = children(server.pid)
        server.terminate()
        assert server.wait(60) == 0
        assert not alive(engine)
    finally:
        server.kill()
        os.close(ours)
    bars = re.findall(r"\r\x1b\[K([█░]+ read weights: [^\r]*)", written)
    assert len(bars) > 2
    assert all(len(bar) < 80 for bar in bars)
    lines = screen(written)
    assert any(line.endswith("WARN  engine: a library speaks") for line in lines)
    assert re.search(r"hotstart: ready after [\d.]+ m?s$", lines[-1])
    rows = lines[next(i for i, line in enumerate(lines) if line.endswith("hotstart: start timeline")) + 1 :]
    assert [line.split("engine")[0].strip() for line in rows if " engine " in line][-1] == "first step"
    assert not [line for line in lines if " INFO  start: first step: " in line]
    assert not [line for line in lines if "░" in line]
    for line in lines:
        assert line.count(" INFO ") + line.count(" WARN ") <= 1


def read_terminal(descriptor: int, *, until: re.Pattern[bytes]) -> str:
    """What a terminal was sent, until ``until`` is among it."""
    data, deadline = b"", time.monotonic() + 60
    while not until.search(data):
        assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], data
        data += os.read(descriptor, 65536)
    return data.decode()


def screen(written: str) -> list[str]:
    """The lines that stay: a carriage return goes back, an erasure empties the line."""
    lines = []
    for line in written.split("\r\n"):
        kept = re.split(r"\r\x1b\[K", line)[-1]
        lines.append(re.sub(r"\x1b\[[0-9;]*m", "", kept))
    return [line for line in lines if line]
