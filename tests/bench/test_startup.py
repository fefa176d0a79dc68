"""The command ``bench startup``, with a stub for the server; the floor is the real one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hotstart.bench import first_minute, pagecache, startup
from hotstart.bench.floor import measure_floor, measure_read
from hotstart.errors import EngineError, HotstartError

STUB = Path(__file__).with_name("stub_server.py")


def test_other_server_is_measured_by_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "import_torch", lambda: 1.0)
    out = tmp_path / "start.json"
    command = f"{sys.executable} {STUB} {{port}}"
    code = startup.main(["--compare", command, "--iterations", "2", "--json", str(out)])
    assert code == 0
    assert "first token" in capsys.readouterr().out
    (state,) = json.loads(out.read_text())["states"]
    assert [len(starts) for starts in state["starts"].values()] == [2]


def test_servers_are_measured_in_turns_and_one_that_fails_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "import_torch", lambda: 1.0)
    journal, out = tmp_path / "journal", tmp_path / "start.json"
    commands = [
        f"{sys.executable} {STUB} {{port}} --journal {journal} --early {how}" for how in ("hold", "refuse")
    ]
    commands.append(f"{sys.executable} {STUB} {{port}} --journal {journal} --early hold --dies gone")
    words = [word for command in commands for word in ("--compare", command)]
    code = startup.main([*words, "--iterations", "2", "--json", str(out)])
    assert code == EngineError.exit_code
    assert journal.read_text().split() == ["hold", "refuse", "refuse", "hold"]
    printed = capsys.readouterr()
    assert "failed: ended with exit code 3 before it answered" in printed.out
    assert "    gone" in printed.err
    document = json.loads(out.read_text())
    first, second, third = document["servers"]
    assert (first, second) == ("stub_server.py hold", "stub_server.py refuse")
    assert [len(starts) for starts in document["states"][0]["starts"].values()] == [2, 2]
    assert set(document["states"][0]["failed"]) == {third}
    assert f"first token of {second}: " in printed.out


def test_first_minute_is_counted_by_the_second_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "import_torch", lambda: 1.0)
    monkeypatch.setattr(first_minute, "SECONDS", 1.0)
    out, png = tmp_path / "start.json", tmp_path / "start.png"
    command = f"{sys.executable} {STUB} {{port}}"
    flags = ["--iterations", "1", "--first-minute", "--json", str(out), "--png", str(png)]
    assert startup.main(["--compare", command, *flags]) == 0
    (state,) = json.loads(out.read_text())["states"]
    (minute,) = state["minutes"].values()
    assert len(minute["tokens"]) == 1
    assert minute["tokens"][0] > 4
    assert minute["failed"] == 0
    assert "  tokens/s, by 5 s" in capsys.readouterr().out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_files_that_a_compared_command_names_are_evicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "import_torch", lambda: 1.0)
    weights, out = tmp_path / "model.gguf", tmp_path / "start.json"
    weights.write_bytes(bytes(1 << 22))
    pagecache.evict_all([str(weights)])
    if pagecache.resident_share([str(weights)]) != 0.0:
        pytest.skip("this file system keeps its files in memory, or does not say")
    command = f"{sys.executable} {STUB} {{port}} --reads {weights}"
    flags = ["--iterations", "1", "--cache", "cold", "--json", str(out)]
    assert startup.main(["--compare", command, *flags]) == 0
    assert "weights in the page cache just before a start: 0%" in capsys.readouterr().out
    (state,) = json.loads(out.read_text())["states"]
    assert state["kept"] == {str(weights): 0.0}
    ((start,),) = state["starts"].values()
    assert start["read_bytes"] >= 1 << 22


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither MODEL nor --compare"),
        (["--compare", "server"], "--compare 'server' does not say where its server listens"),
        (["--compare", "server 'x"], "is no command line: No closing quotation"),
        (
            ["--compare", "server --port {port}", "--json", "no/place/x"],
            "--json no/place/x cannot be written",
        ),
        (["no/such/model"], "no/such/model is no directory"),
        (
            ["s3://b/m"],
            r"s3://b/m lies in a store.*--compare 'hotstart serve s3://b/m --port \{port\}'",
        ),
        (["--iterations", "0"], "--iterations is 0; expected a whole number"),
    ],
)
def test_bad_command_lines_are_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises(HotstartError, match=message):
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
