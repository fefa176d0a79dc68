"""Sealed networks, users without a home, caches that cannot be written, neighbours: the start goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from object_servers import S3Server
from running_server import RunningServer, command, run_to_end, until_gone

Model = Callable[..., Path]

UNKNOWN_USER = ("unshare", "--user", "--map-user=54321", "--map-group=54321")
"""A uid that no passwd knows and no capability serves; rights on files stay those of who runs the test."""


LOOPBACK_ONLY = ("unshare", "--user", "--map-root-user", "--net")


def possible(*namespace: str) -> bool:
    """Whether this machine lets tests make such a namespace."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*namespace, "true"], capture_output=True).returncode == 0


def start_and_stop(
    model: Path | str, *flags: str, inside: tuple[str, ...] = (), env: dict[str, str | None]
) -> tuple[int, str]:
    """Exit code and output of a server that is stopped once it is ready."""
    variables = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    with subprocess.Popen(
        [*inside, sys.executable, "-c", SERVE_ONCE, *command(model, 0, *flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
    ) as process:
        output, _ = process.communicate(timeout=60)
    return process.returncode, output


SERVE_ONCE = """
import signal, subprocess, sys
with subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
    for line in server.stdout:
        print(line, end="", flush=True)
        if "hotstart: ready after " in line:
            server.send_signal(signal.SIGTERM)
sys.exit(server.returncode)
"""

CHAT_ON_LOOPBACK_ONLY = """
import fcntl, json, os, signal, socket, struct, subprocess, sys, time, urllib.request
with socket.socket() as probe:  # SIOCSIFFLAGS: loopback up; there is nothing else in this namespace
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", b"lo", 1))
server = subprocess.Popen(sys.argv[2:], env={**os.environ, "PYTHONPATH": sys.argv[1]})

def ask(path, body):
    data = json.dumps({"max_tokens": 4, "ignore_eos": True, **body}).encode()
    url = f"http://127.0.0.1:8000{path}"
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    while server.poll() is None:
        try:
            return urllib.request.urlopen(request).read().decode()
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"
        except OSError:
            time.sleep(0.02)  # not bound yet

try:
    print(ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}))
    print(ask("/v1/completions", {"prompt": "Hello"}))
finally:
    server.send_signal(signal.SIGTERM)
    code = server.wait()
sys.exit(code)
"""

REPORT_CONNECTIONS = """
import sys
def hook(event, args):
    if event == "socket.connect" or event == "socket.getaddrinfo" and args[0] != "127.0.0.1":
        print("NETWORK", event, args, file=sys.stderr, flush=True)
sys.addaudithook(hook)
"""


@pytest.mark.skipif(not possible(*LOOPBACK_ONLY), reason="no network namespaces here")
@pytest.mark.parametrize("template", [True, False])
def test_a_local_path_needs_no_network_from_the_start_through_the_first_chat(
    tiny_model: Model, tmp_path: Path, template: bool
) -> None:
    """Nothing optional is there, which is what other servers go and look for elsewhere."""
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    (model / "tokenizer_config.json").unlink()
    (tmp_path / "sitecustomize.py").write_text(REPORT_CONNECTIONS)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    flags = ["--chat-template", "{{ messages[0]['content'] }}"] if template else []
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [*LOOPBACK_ONLY, sys.executable, "-c", CHAT_ON_LOOPBACK_ONLY, path, *command(model, 8000, *flags)],
        env={**variables, "HOTSTART_CACHE_ROOT": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    chat, completion = done.stdout.splitlines()
    assert ('"completion_tokens":4' if template else "has no chat template") in chat
    assert '"completion_tokens":4' in completion
    assert "NETWORK" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not possible(*UNKNOWN_USER), reason="no user namespaces here")
def test_an_unknown_user_without_a_home_writes_to_the_cache_root_only(
    tiny_model: Model, tmp_path: Path
) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    temporary.mkdir()
    env = {"HOME": None, "HOTSTART_CACHE_ROOT": str(cache), "TMPDIR": str(temporary)}
    code, output = start_and_stop(tiny_model(), inside=UNKNOWN_USER, env=env)
    assert code == 0
    assert f"cache root {cache} (HOTSTART_CACHE_ROOT)" in output
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(not possible(*UNKNOWN_USER), reason="no user namespaces here")
def test_an_unknown_user_without_anything_starts_with_one_line(tiny_model: Model) -> None:
    env = {"HOME": None, "HOTSTART_CACHE_ROOT": None}
    code, output = start_and_stop(tiny_model(), inside=UNKNOWN_USER, env=env)
    assert code == 0
    assert output.count("no home directory for user 54321 and no --cache-root") == 1
    assert "Traceback" not in output


@pytest.mark.skipif(not possible(*UNKNOWN_USER), reason="no user namespaces here")
def test_an_unknown_user_without_anything_starts_from_a_store_and_leaves_nothing(
    s3: S3Server, tmp_path: Path
) -> None:
    env = {"HOME": None, "HOTSTART_CACHE_ROOT": None, "TMPDIR": str(tmp_path), **s3.environ}
    code, output = start_and_stop("s3://models/tiny", inside=UNKNOWN_USER, env=env)
    assert code == 0
    assert f"small files: in {tmp_path}/hotstart-small-files-" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    not possible("unshare", "--user", "--map-root-user", "--mount"), reason="no mount namespaces here"
)
@pytest.mark.parametrize(
    ("prepare", "obstacle"),
    [
        ("mount -t tmpfs -o ro none {place}", "Read-only file system"),
        ("mount -t tmpfs -o size=1m none {place} && ! cat /dev/zero 2>/dev/null >{place}/x", "No space left"),
    ],
)
def test_a_cache_root_that_is_read_only_or_full_costs_one_line(
    prepare: str, obstacle: str, tiny_model: Model, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    script = prepare.format(place=place) + ' && exec "$@"'
    inside = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    env = {"HOME": str(place), "HOTSTART_CACHE_ROOT": str(place)}
    code, output = start_and_stop(tiny_model(), inside=inside, env=env)
    assert code == 0
    [line] = [line for line in output.splitlines() if str(place) in line]
    assert f"cache root {place} (HOTSTART_CACHE_ROOT) cannot be written ({obstacle}" in line
    assert "this start goes on without caches" in line


@pytest.mark.skipif(
    not possible("unshare", "--user", "--map-root-user", "--mount"), reason="no mount namespaces here"
)
def test_a_machine_without_proc_costs_one_line(tiny_model: Model) -> None:
    script = 'mount -t tmpfs none /proc && exec "$@"'
    inside = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    code, output = start_and_stop(tiny_model(), inside=inside, env={})
    assert code == 0
    [line] = [line for line in output.splitlines() if "hotstart: /proc cannot be read" in line]
    assert "WARN" in line
    assert "Traceback" not in output


def test_variables_of_a_service_named_hotstart_cost_one_line(tmp_path: Path) -> None:
    link = "tcp://10.0.0.1:8000"
    env = {
        "HOTSTART_SERVICE_HOST": "10.0.0.1",
        "HOTSTART_SERVICE_PORT": "8000",
        "HOTSTART_SERVICE_PORT_HTTP": "8000",
        "HOTSTART_PORT": link,
        "HOTSTART_PORT_8000_TCP": link,
        "HOTSTART_PORT_8000_TCP_PROTO": "tcp",
        "HOTSTART_PORT_8000_TCP_PORT": "8000",
        "HOTSTART_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    code, output = run_to_end(tmp_path / "absent", env=env)
    assert code == 3
    [line] = [line for line in output.splitlines() if "HOTSTART_" in line and "cache root" not in line]
    assert "a cluster sets such variables for a service named hotstart" in line


@pytest.mark.skipif(not possible(*UNKNOWN_USER), reason="no user namespaces here")
def test_a_port_below_1024_without_rights_is_refused_at_once(tmp_path: Path) -> None:
    with Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").open() as file:
        if int(file.read()) <= 81:
            pytest.skip("every user may bind low ports here")
    done = subprocess.run([*UNKNOWN_USER, *command(tmp_path, 81)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "127.0.0.1:81 needs rights that uid 54321 does not have" in done.stderr


def test_two_servers_start_at_once_on_one_cache_root(tiny_model: Model, tmp_path: Path) -> None:
    first = RunningServer(tiny_model(), log=tmp_path / "first")
    second = RunningServer(tiny_model(), log=tmp_path / "second")
    with first, second:
        texts = [server.until_ready().complete()["choices"][0]["text"] for server in (first, second)]
    assert texts[0] == texts[1]
    assert f"cache root {tmp_path / 'cache'}" in first.output
    assert "WARN  hotstart: cache root" not in first.output + second.output


def test_a_start_that_was_killed_leaves_nothing_that_blocks_the_next(
    tiny_model: Model, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    before = sorted(path.name for path in model.iterdir())
    for turn, pause in enumerate((0.05, 0.3, 0.9)):
        with RunningServer(model, log=tmp_path / f"killed{turn}") as server:
            server.until(lambda server=server: server.engine_pid != 0)
            engine = server.engine_pid
            threading.Event().wait(pause)
            os.kill(server.process.pid, signal.SIGKILL)
            until_gone(engine)
    for name in (".lock", "model.safetensors.lock"):  # what other tools leave behind
        (model / name).write_text("4242")
    with RunningServer(model, log=tmp_path / "next") as server:
        assert server.until_ready().complete()["usage"]["completion_tokens"] == 8
    assert sorted(path.name for path in model.iterdir() if not path.name.endswith(".lock")) == before
    assert list((tmp_path / "cache").glob(".probe-*")) == []
