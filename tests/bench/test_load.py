"""The command ``bench load``: each loader in a process of its own, and every byte accounted for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hotstart.bench import load, load_loader
from hotstart.bench.load import Runs, ceiling, choose_loaders, mark_different
from hotstart.bench.load_children import run_once
from hotstart.bench.load_loader import Measurement, Task
from hotstart.bench.load_loaders import NAMED
from hotstart.bench.load_local import PLAIN
from hotstart.bench.load_readers import read_parallel
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.errors import ConfigError, DeviceError, EngineError, StorageError
from object_servers import S3Server

TinyModel = Callable[..., Path]


def task(loader: str, model: Path) -> Task:
    checkpoint = open_checkpoint(str(model))
    files = [(file.path, file.size) for file in checkpoint.files]
    return Task(loader, str(model), files, sorted(checkpoint.tensors))


def test_loaders_of_a_directory_are_measured_side_by_side(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama", dtype="bfloat16", shards=2)
    out, picture = tmp_path / "load.json", tmp_path / "load.png"
    words = [
        "--loader",
        "hotstart",
        "safetensors",
        "--iterations",
        "2",
        "--json",
        str(out),
        "--png",
        str(picture),
    ]
    assert load.main([str(model), *words]) == 0
    text = capsys.readouterr().out
    assert "ceiling: plain" in text
    assert "hotstart: map" in text
    (state,) = json.loads(out.read_text())["states"]
    assert {name: len(rounds) for name, rounds in state["loaders"].items()} == {
        "hotstart": 2,
        "safetensors": 2,
    }
    everything = [each for rows in (*state["loaders"].values(), *state["plain"].values()) for each in rows]
    assert len({each["digest"] for each in everything if not each["error"]}) == 1
    assert all(each["peak"] >= each["before"] > 0 for each in everything if not each["error"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_after_the_first_round_only_the_fastest_plain_readers_go_on(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    out = tmp_path / "load.json"
    load.main([str(tiny_model()), "--loader", "hotstart", "--iterations", "2", "--json", str(out)])
    (state,) = json.loads(out.read_text())["states"]
    assert set(state["plain"]) == set(PLAIN)
    assert sorted(len(rounds) for rounds in state["plain"].values())[-4:] == [1, 2, 2, 2]
    assert len(state["plain"][state["ceiling"]["reader"]]) == 2


@pytest.mark.parametrize("strategy", ["map", "buffered"])
def test_each_read_strategy_can_be_measured_by_name(tiny_model: TinyModel, strategy: str) -> None:
    model = tiny_model("llama", shards=2)
    measured = run_once(task(f"hotstart-{strategy}", model))
    assert measured.note.startswith(f"{strategy} (")
    assert measured.digest == run_once(task("plain buffered, 2 x 4 MiB", model)).digest


def test_checksum_covers_the_last_byte_of_a_tensor(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model()
    before = run_once(task("hotstart", source)).digest
    for name in os.listdir(source):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert run_once(task("hotstart", tmp_path)).digest != before


def test_loader_that_fails_is_a_result_with_its_last_words(tiny_model: TinyModel, tmp_path: Path) -> None:
    missing = task("plain buffered, 2 x 4 MiB", tiny_model())
    gone = Task(missing.loader, str(tmp_path), [(str(tmp_path / "gone.safetensors"), 100)], missing.names)
    assert "gone.safetensors" in run_once(gone).error


def test_loader_that_fails_keeps_its_row_and_the_others_their_figures(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tiny_model(), tmp_path / "load.json"
    model = tmp_path / "model"
    model.mkdir()
    for name in os.listdir(source):
        if name.endswith(".safetensors"):
            (model / name).write_bytes((source / name).read_bytes())
    words = ["--loader", "transformers", "hotstart", "--iterations", "1", "--json", str(out)]
    assert load.main([str(model), *words]) == 0  # there is no config.json, which only one of them needs
    assert "failed: " in capsys.readouterr().out
    (state,) = json.loads(out.read_text())["states"]
    assert state["loaders"]["transformers"][0]["error"]
    assert not state["loaders"]["hotstart"][0]["error"]


def test_other_bytes_are_an_error_that_names_the_loader() -> None:
    runs = Runs("warm")
    runs.plain["plain map"] = [Measurement(1.0, digest="a"), Measurement(1.0, digest="a")]
    runs.loaders["other"] = [Measurement(0.1, digest="a"), Measurement(0.1, digest="b")]
    assert mark_different(runs) == ["other (warm): other bytes: checksum b, not a"]
    assert [bool(each.error) for each in runs.loaders["other"]] == [False, True]


def test_other_bytes_end_the_command_after_its_report(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lie(task: Task, timeout: float) -> Measurement:
        return Measurement(1.0, digest=task.loader if task.loader == "safetensors" else "")

    monkeypatch.setattr(load, "run_once", lie)
    with pytest.raises(EngineError, match=r"safetensors \(warm\): other bytes"):
        load.main([str(tiny_model()), "--loader", "safetensors", "hotstart", "--iterations", "1"])
    assert "hotstart" in capsys.readouterr().out


def test_files_are_evicted_after_the_imports_and_what_stayed_is_told(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "load.json"
    words = ["--loader", "hotstart-buffered", "--iterations", "1", "--cache", "both", "--json", str(out)]
    load.main([str(tiny_model()), *words])
    states = {state["state"]: state["loaders"] for state in json.loads(out.read_text())["states"]}
    (warm,), (cold,) = (states[name]["hotstart-buffered"] for name in ("warm", "cold"))
    if warm["resident"] is None:
        pytest.skip("the kernel does not tell what is resident")
    assert warm["resident"] == 1.0
    not_cold = "not cold: hotstart-buffered" in capsys.readouterr().out
    assert not_cold == (cold["resident"] > 0.05)


def test_ceiling_is_the_fastest_plain_reader_of_all_rounds() -> None:
    runs = Runs("warm")
    runs.plain = {
        "lucky once": [Measurement(0.1)],
        "slow": [Measurement(3.0), Measurement(3.0), Measurement(9.0)],
        "fast": [Measurement(2.0), Measurement(1.0), Measurement(2.5)],
        "broken": [Measurement(0.0), Measurement(0.0), Measurement(error="no direct reads")],
    }
    assert ceiling(runs) == ("fast", 2.0)


def test_sparse_files_are_refused_as_a_measurement(tiny_model: TinyModel, tmp_path: Path) -> None:
    data = next(tiny_model().glob("*.safetensors")).read_bytes()
    length = int.from_bytes(data[:8], "little")
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(data[: 8 + length])
        file.truncate(len(data))
    with open(tmp_path / "model.safetensors", "rb") as file:
        if os.lseek(file.fileno(), 0, os.SEEK_HOLE) == len(data):
            pytest.skip("this file system does not tell where holes are")
    with pytest.raises(ConfigError, match="is sparse: nothing is stored from byte"):
        load.main([str(tmp_path)])


def test_loader_that_is_not_installed_is_named_with_the_command(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_loader, "find_spec", lambda name: None)
    assert load.main([str(tiny_model()), "--loader", "hotstart", "runai", "--iterations", "1"]) == 0
    assert "not measured: runai: not installed; pip install" in capsys.readouterr().out


def test_loader_with_a_file_format_of_its_own_is_left_out_unless_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_loader, "find_spec", lambda name: name)
    chosen, left_out = choose_loaders("file", [])
    assert "tensorizer" not in chosen
    assert "converted" in left_out["tensorizer"]
    assert choose_loaders("file", ["tensorizer"])[0] == ["tensorizer"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no/such/model"], "no/such/model is no directory"),
        (["/", "--loader", "nobody"], "--loader is nobody"),
        (["/", "--device", "gpu"], "--device gpu; expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_bad_command_lines_are_refused_before_anything_is_read(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load.main(words)


def test_a_gpu_that_is_not_there_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nor on a machine that has one
    with pytest.raises(DeviceError, match=r"--device cuda, but (the installed torch has no CUDA|.* hides)"):
        load.main(["no/such/model", "--device", "cuda"])


def test_loader_that_cannot_read_from_there_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"--loader http.client reads no files"):
        load.main([str(tiny_model()), "--loader", "http.client"])
    with pytest.raises(ConfigError, match=r"--loader instanttensor does not load into memory"):
        load.main([str(tiny_model()), "--loader", "instanttensor"])


def test_loaders_of_an_object_store_are_measured_side_by_side(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tiny_model("llama", shards=2), tmp_path / "load.json"
    monkeypatch.setenv("HOTSTART_CACHE_ROOT", str(tmp_path / "cache"))
    address = f"s3://{model.parent.name}/{model.name}"
    loaders = ["hotstart", "runai", "http.client", "obstore"]
    words = ["--loader", *loaders, "--iterations", "1", "--json", str(out)]
    with S3Server(model.parent.parent) as s3:
        for name, value in s3.environ.items():
            monkeypatch.setenv(name, value)
        assert load.main([address, *words]) == 0
        with pytest.raises(ConfigError, match="--cache cold does not apply"):
            load.main([address, "--cache", "cold"])
    assert "ceiling: http.client" in capsys.readouterr().out
    (state,) = json.loads(out.read_text())["states"]
    assert not any(rounds[0]["error"] for rounds in state["loaders"].values())
    assert len({rounds[0]["digest"] for rounds in state["loaders"].values()}) == 1


def test_plain_reads_fill_every_byte_whatever_the_chunk() -> None:
    data = [os.urandom(size) for size in (0, 1, 4096, 10_007)]

    def read(file: int, offset: int, view: memoryview) -> None:
        view[:] = data[file][offset : offset + len(view)]

    images = read_parallel([len(each) for each in data], 3, 1000, read)
    assert [bytes(image) for image in images] == data


@pytest.mark.parametrize("flag", ["--json", "--png"])
def test_where_no_result_can_be_written_nothing_is_measured(
    flag: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "run_once", lambda *_: pytest.fail("measured"))
    with pytest.raises(StorageError, match=f"{flag} .*No such file or directory"):
        load.main([str(tiny_model()), flag, str(tmp_path / "gone" / "out")])


def test_copy_that_cannot_be_made_leaves_the_others_their_rows(
    tiny_model: TinyModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(paths: list[str], target: str) -> None:
        raise ModuleNotFoundError("No module named 'boto3'")

    monkeypatch.setattr(load, "convert_for_tensorizer", broken)
    load.main([str(tiny_model()), "--iterations", "1", "--loader", "hotstart", "tensorizer"])
    out = capsys.readouterr().out
    assert (
        "not measured: tensorizer: its copy cannot be made: ModuleNotFoundError: No module named 'boto3'"
        in out
    )
    assert "hotstart " in out


def test_what_only_the_measurement_needs_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_loader, "find_spec", lambda name: None if name == "safetensors" else object())
    assert NAMED["tensorizer"].absent == "pip install safetensors"
    assert NAMED["safetensors"].absent == "pip install safetensors"
