"""Every symptom in docs/troubleshooting.md is provoked, and shows exactly the line that the page gives."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from checkpoint_files import STUB, shard_name, write_model
from convert_symptoms import CONVERTING
from engine_faults import SLOW_READS, engine_fault
from hotstart.cli.main import main
from loader_symptoms import LOADERS, Loading
from object_servers import S3Server
from running_server import RunningServer
from storage_symptoms import STORAGE, Place

PAGES = Path(__file__).resolve().parents[1] / "docs"
ENTRY = re.compile(
    r"^### (?P<title>.+?)\n\n```text\n(?P<line>.+?)\n```\n\n(?P<cause>.+?)\n\n```console\n", re.M | re.S
)


def entries(page: str) -> dict[str, str]:
    """Title → log line."""
    return {e["title"]: e["line"] for e in ENTRY.finditer((PAGES / page).read_text(encoding="utf-8"))}


def pattern(line: str) -> re.Pattern[str]:
    """The line as written, with anything but a line's end in the place of each ``…``."""
    return re.compile(".+?".join(re.escape(part) for part in line.split("…")))


class Bench:
    """What provocations work with."""

    def __init__(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model = model
        self._capsys = capsys

    def check(self, *flags: str, model: Path | str | None = None) -> str:
        """Output of a ``hotstart check`` that finds something."""
        assert main(["check", str(model or self.model), *flags]) > 1
        captured = self._capsys.readouterr()
        return captured.out + captured.err

    def edit_config(self, **changes: Any) -> None:
        path = self.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    @property
    def shard(self) -> Path:
        return self.model / shard_name(1, 2)


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("whole") / "model", vocab_size=tiny_models.VOCAB)
    tiny_models.write_tokenizer(directory)
    return directory


@pytest.fixture
def bench(whole_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(shutil.copytree(whole_model, tmp_path / "model"), capsys)


def path_with_a_typo(bench: Bench) -> str:
    return bench.check(model=bench.model.with_name("modle"))


def directory_that_is_no_mount(bench: Bench) -> str:
    return bench.check("--expect-mount", str(bench.model))


def empty_directory(bench: Bench) -> str:
    (bench.model.parent / "empty").mkdir()
    return bench.check(model=bench.model.parent / "empty")


def medium_as_format(bench: Bench) -> str:
    return bench.check("--load-format", "nvme")


def cut_shard(bench: Bench) -> str:
    os.truncate(bench.shard, bench.shard.stat().st_size - 1)
    return bench.check()


def pointer_stub(bench: Bench) -> str:
    bench.shard.write_bytes(STUB)
    return bench.check()


def absent_shard(bench: Bench) -> str:
    bench.shard.unlink()
    return bench.check()


def pickled_weights(bench: Bench) -> str:
    for path in bench.model.glob("model*"):
        path.unlink()
    (bench.model / "pytorch_model.bin").write_bytes(b"\x80\x02")
    return bench.check()


def config_with_another_layer(bench: Bench) -> str:
    bench.edit_config(num_hidden_layers=3)
    return bench.check()


def refused_loader(bench: Bench) -> str:
    return bench.check("--load-format", "mistral")


def unsupported_architecture(bench: Bench) -> str:
    bench.edit_config(architectures=["MambaForCausalLM"])
    return bench.check()


def quantised_checkpoint(bench: Bench) -> str:
    bench.edit_config(quantization_config={"quant_method": "fp8"})
    return bench.check()


def context_that_does_not_fit(bench: Bench) -> str:
    bench.edit_config(max_position_embeddings=1 << 28)
    return bench.check("--gpu-memory-utilization", "0.001", "--device", "cpu")


def kv_cache_that_does_not_fit(bench: Bench) -> str:
    return bench.check("--kv-cache-memory-bytes", "900TB", "--device", "cpu")


def absent_cuda(bench: Bench) -> str:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a CUDA driver")
    return bench.check("--device", "cuda")


def two_ranks(bench: Bench) -> str:
    return bench.check("--tensor-parallel-size", "2")


def unknown_flag(bench: Bench) -> str:
    return bench.check("--max-modle-len", "4k")


def two_models(bench: Bench) -> str:
    return bench.check("/models/other")


def taken_port(bench: Bench) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return bench.check("--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))


CHECKS: dict[str, Callable[[Bench], str]] = {
    "The port is taken": taken_port,
    "The path does not exist": path_with_a_typo,
    "The volume is not mounted": directory_that_is_no_mount,
    "The directory is empty": empty_directory,
    "A medium is given as a format": medium_as_format,
    "A weight file is too short": cut_shard,
    "A weight file is a pointer": pointer_stub,
    "The index names an absent file": absent_shard,
    "Only pickled weights": pickled_weights,
    "Weights are missing": config_with_another_layer,
    "A loader is refused": refused_loader,
    "The architecture is not supported": unsupported_architecture,
    "The checkpoint is quantised": quantised_checkpoint,
    "It does not fit": context_that_does_not_fit,
    "The KV cache is larger than free memory": kv_cache_that_does_not_fit,
    "No CUDA device is found": absent_cuda,
    "More than one rank is wanted": two_ranks,
    "A flag is unknown": unknown_flag,
    "Two models are given": two_models,
}


@pytest.mark.parametrize("title", CHECKS)
def test_check_says_what_the_page_says(title: str, bench: Bench) -> None:
    line = entries("troubleshooting.md")[title]
    assert pattern(line).search(CHECKS[title](bench)), line


@pytest.fixture(scope="module")
def store(whole_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The model is at ``s3://models/tiny``."""
    root = tmp_path_factory.mktemp("buckets")
    shutil.copytree(whole_model, root / "models" / "tiny")
    with S3Server(root) as serving:
        yield serving


@pytest.mark.parametrize("title", [*STORAGE, *CONVERTING])
def test_storage_says_what_the_page_says(
    title: str,
    bench: Bench,
    store: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = entries("troubleshooting.md")[title]
    place = Place(bench.model, store, bench.model.parent, monkeypatch, capsys)
    assert pattern(line).search({**STORAGE, **CONVERTING}[title](place)), line


@pytest.fixture(scope="module")
def server(whole_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One that runs one request at a time, lets one wait, has no chat template and nowhere to cache."""
    folder = tmp_path_factory.mktemp("server")
    model = shutil.copytree(whole_model, folder / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    configuration = json.loads((model / "tokenizer_config.json").read_text())
    configuration.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(configuration))
    (folder / "file").touch()
    bounds = ("--max-num-seqs", "1", "--max-queued-requests", "1", "--threads", "1")
    nowhere = ("--cache-root", str(folder / "file/cache"))
    with RunningServer(model, *bounds, *nowhere, log=folder / "log") as running:
        yield running.until_ready()


def request(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> str:
    """The message of an answer that is an error."""
    body = {"model": "tiny", "prompt": "Hello", **fields}
    message: str = server.http.post(path, json=body).json()["error"]["message"]
    return message


def early_request(server: RunningServer, tmp_path: Path) -> str:
    model = server.process.args[4]  # type: ignore[index]
    with RunningServer(model, "--no-hold-requests", log=tmp_path / "log") as starting:
        starting.until(lambda: starting.get_status("/livez") == 200)
        return request(starting)


def full_queue(server: RunningServer, tmp_path: Path) -> str:
    """Of two long answers one runs and one waits; the next request is too many."""
    body = {"model": "tiny", "prompt": ["Hello", "World"], "max_tokens": 100, "ignore_eos": True}
    asking = threading.Thread(target=server.http.post, args=("/v1/completions",), kwargs={"json": body})
    asking.start()
    server.until(lambda: server.metric("vllm:num_requests_waiting") >= 1)
    message = request(server, max_tokens=1)
    asking.join()
    return message


def short_of_files(server: RunningServer, tmp_path: Path) -> str:
    """The limit comes down to a few more than are open, and a few clients come."""
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 8, before[1]))
    with contextlib.ExitStack() as idle:
        while "refused" not in server.output:
            client = idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            client.recv(1 << 16)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    return server.output


def flooded_connection(server: RunningServer, tmp_path: Path) -> str:
    with (
        socket.create_connection(("127.0.0.1", server.port)) as client,
        contextlib.suppress(ConnectionError),
    ):
        client.sendall(b"GET /livez HTTP/1.1\r\nX-Long: " + b"x" * 100_000)
        while client.recv(65536):
            pass
    return server.output


def storage_that_hangs(server: RunningServer, tmp_path: Path) -> str:
    fault = {"BYTES_PER_SECOND": "1e12", "STOP_AFTER": "0", "GO_ON": str(tmp_path / "never")}
    env = engine_fault(tmp_path, SLOW_READS, **fault)
    flags = ("--read-strategy", "buffered", "--stall-timeout", "1")
    model = server.process.args[4]  # type: ignore[index]
    with RunningServer(model, *flags, env=env, log=tmp_path / "log") as stalled:
        stalled.until(lambda: stalled.get_status("/livez") == 200)
        stalled.until(lambda: stalled.get_status("/livez") == 503)
        message: str = stalled.http.get("/livez").json()["message"]
    return message


def file_that_shrinks(server: RunningServer, tmp_path: Path) -> str:
    model = shutil.copytree(server.process.args[4], tmp_path / "model")  # type: ignore[index]
    with RunningServer(model, "--read-strategy", "map", log=tmp_path / "log") as doomed:
        doomed.until_ready()
        os.truncate(model / shard_name(1, 2), 5000)
        doomed.http.post("/v1/completions", json={"model": "tiny", "prompt": "Hello"})
        doomed.process.wait(60)
    return doomed.output


def killed_engine(server: RunningServer, tmp_path: Path) -> str:
    model = server.process.args[4]  # type: ignore[index]
    with RunningServer(model, log=tmp_path / "log") as doomed:
        doomed.until_ready()
        os.kill(doomed.engine_pid, signal.SIGKILL)
        doomed.process.wait(60)
    return doomed.output


SERVING: dict[str, Callable[[RunningServer, Path], str]] = {
    "Nothing answers from outside": lambda server, _: server.output,
    "Requests get 503": early_request,
    "The model is not found": lambda server, _: request(server, model="other"),
    "Requests get 429": full_queue,
    "Connections are refused": short_of_files,
    "Chat does not work, completions do": lambda server, _: server.output,
    "A connection is closed": flooded_connection,
    "The start stands still": storage_that_hangs,
    "A weight file changes under the server": file_that_shrinks,
    "The engine was killed": killed_engine,
    "The cache cannot be written": lambda server, _: server.output,
}


@pytest.mark.parametrize("title", LOADERS)
def test_loading_says_what_the_page_says(
    title: str,
    whole_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = entries("troubleshooting.md")[title]
    assert pattern(line).search(LOADERS[title](Loading(whole_model, tmp_path, monkeypatch, capsys))), line


@pytest.mark.parametrize("title", SERVING)
def test_serve_says_what_the_page_says(title: str, server: RunningServer, tmp_path: Path) -> None:
    line = entries("troubleshooting.md")[title]
    assert pattern(line).search(SERVING[title](server, tmp_path)), line


CHECK_AS_NOBODY = """
import os, sys
from hotstart.cli.main import main
main(["check", sys.argv[1]])  # imports everything while this user still may
os.chmod(sys.argv[2], 0)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
main(["check", sys.argv[1]])
"""


def test_file_without_permission_says_what_the_page_says(whole_model: Path) -> None:
    """On a copy that every user can reach, which pytest's own folders do not allow."""
    line = entries("troubleshooting.md")["A file cannot be read"]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        model = shutil.copytree(whole_model, Path(folder) / "model")
        model.chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", CHECK_AS_NOBODY, str(model), str(model / shard_name(1, 2))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
    assert pattern(line).search(done.stdout), done.stdout + done.stderr


def test_every_entry_is_provoked() -> None:
    provoked = {*CHECKS, *STORAGE, *CONVERTING, *LOADERS, *SERVING, "A file cannot be read"}
    assert set(entries("troubleshooting.md")) == provoked


def test_both_languages_have_the_same_entries_in_the_same_order() -> None:
    english, chinese = entries("troubleshooting.md"), entries("troubleshooting.zh-CN.md")
    assert list(english.values()) == list(chinese.values())


def test_no_heading_lacks_its_line_its_cause_or_its_command() -> None:
    for page in ("troubleshooting.md", "troubleshooting.zh-CN.md"):
        assert (PAGES / page).read_text(encoding="utf-8").count("\n### ") == len(entries(page))
