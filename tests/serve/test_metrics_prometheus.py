"""A real Prometheus scrapes a real server by the configuration of the documentation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from running_server import DEADLINE, RunningServer, free_port

PAGE = (Path(__file__).resolve().parents[2] / "docs/metrics.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.+?)^```$", PAGE, re.M | re.S)


@contextmanager
def prometheus(folder: Path, config: str) -> Iterator[Callable[[str], Any]]:
    """What it answers to a query."""
    (folder / "prometheus.yml").write_text(config)
    port = free_port()
    log = (folder / "prometheus.log").open("wb")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--storage.tsdb.retention.time=1h",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=log,
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def query(expression: str) -> Any:
        text = urllib.parse.urlencode({"query": expression})
        with opener.open(f"http://127.0.0.1:{port}/api/v1/query?{text}", timeout=DEADLINE) as response:
            return json.load(response)["data"]["result"]

    try:
        yield query
    finally:
        process.kill()
        process.wait(DEADLINE)
        log.close()


def test_prometheus_scrapes_a_server_and_answers_the_queries_of_the_page(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    model = tiny_model(shards=2)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    with RunningServer(model, log=tmp_path / "log.txt") as server:
        config = blocks("yaml")[0]
        assert "localhost:8000" in config
        config = config.replace("localhost:8000", f"127.0.0.1:{server.port}")
        with prometheus(tmp_path, config.replace("5s", "100ms")) as query:
            server.until_ready().complete()

            def scraped() -> Any:
                try:
                    return query("hotstart:load_bytes_total")
                except OSError:  # it is not up yet
                    return None

            server.until(scraped)
            read = query("sum by (source) (hotstart:load_bytes_total)")
            answers = {line: query(line) for block in blocks("promql") for line in block.splitlines()}
    assert [float(row["value"][1]) for row in read] == [size]
    told = {line for line, answer in answers.items() if answer}
    assert {line for line in answers if line.startswith(("hotstart:startup", "sum by (source"))} <= told
    assert len(answers) == 10


def test_the_configurations_of_the_page_are_valid(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    static, pods = blocks("yaml")
    # Debian builds it without Kubernetes.
    targets = "static_configs:\n      - targets: []"
    without = re.sub(r"kubernetes_sd_configs:\n +- role: pod", targets, pods)
    assert without != pods
    for number, config in enumerate((static, without)):
        file = tmp_path / f"{number}.yml"
        file.write_text(config)
        done = subprocess.run(["promtool", "check", "config", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
