"""The command ``bench startup``, with a stub for the server; the floor is the real one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hotstart.bench import pagecache, startup
from hotstart.bench.floor import measure_floor, measure_read
from hotstart.errors import ConfigError, EngineError
from running_server import free_port

STUB = Path(__file__).with_name("stub_server.py")


def test_other_server_is_measured_by_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "import_torch", lambda: 1.0)
    port, out = free_port(), tmp_path / "start.json"
    command = f"{sys.executable} {STUB} {port}"
    code = startup.main(["--command", command, "--port", str(port), "--iterations", "2", "--json", str(out)])
    assert code == 0
    assert "first token" in capsys.readouterr().out
    (state,) = json.loads(out.read_text())["states"]
    assert [len(starts) for starts in state["starts"].values()] == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither MODEL nor --command"),
        (["--command", "server"], "--command and --port belong together"),
        (["no/such/model"], "no/such/model is no directory"),
        (
            ["s3://b/m"],
            r"s3://b/m lies in a store.*--port 8001 --command 'hotstart serve s3://b/m --port 8001'",
        ),
        (["--iterations", "0"], "--iterations is 0; expected a whole number"),
    ],
)
def test_bad_command_lines_are_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        startup.main(arguments)


def test_floor_contains_import_bytes_and_forward(tiny_model: Callable[..., Path]) -> None:
    floor = measure_floor(str(tiny_model("llama", dtype="bfloat16", shards=2)), "map")
    assert 0 < floor.imported <= floor.arrived < floor.total
    assert floor.bytes > 0


def test_floor_of_files_that_are_read_has_the_same_parts(tiny_model: Callable[..., Path]) -> None:
    floor = measure_floor(str(tiny_model("llama-tied", dtype="bfloat16")), "buffered")
    assert 0 < floor.imported <= floor.arrived < floor.total


def test_floor_of_a_device_goes_through_its_arena(tiny_model: Callable[..., Path]) -> None:
    floor = measure_floor(str(tiny_model("llama", dtype="bfloat16", shards=2)), "arena", "cpu")
    assert 0 < floor.imported <= floor.arrived < floor.total
    assert floor.bytes > 0


def test_plain_read_takes_time(tiny_model: Callable[..., Path]) -> None:
    assert measure_read(str(tiny_model()), "buffered") > 0


def test_floor_of_damaged_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(EngineError, match="the floor could not be measured"):
        measure_read(str(tmp_path), "buffered")


def test_files_leave_the_page_cache_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(1 << 22))
    pagecache.evict_all([str(path)])
    evicted = pagecache.resident_share([str(path)])
    if evicted is None or evicted > 0.5:
        pytest.skip("this file system keeps its files in memory, or does not say")
    pagecache.warm([str(path)])
    assert pagecache.resident_share([str(path)]) == 1.0
