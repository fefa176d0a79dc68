"""``bench load`` into a device: the same bytes, read back; a device of host memory stands for a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hotstart.bench import load, load_report
from hotstart.bench.load import Runs, Subject, choose_loaders
from hotstart.bench.load_children import run_once, run_together
from hotstart.bench.load_device import MemoryWatch, read_back
from hotstart.bench.load_loader import Measurement, Span, Task
from hotstart.bench.load_loaders import NAMED, READERS
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.device.base import DeviceInfo
from hotstart.device.choose import DeviceChoice
from hotstart.device.fake import FakeDevice
from hotstart.errors import ConfigError

TinyModel = Callable[..., Path]
INFO = DeviceInfo("cuda", 0, "NVIDIA H200", "GPU-1", False, (9, 0), 141 << 30)


def task(loader: str, model: Path, device: str) -> Task:
    checkpoint = open_checkpoint(str(model))
    files = [(file.path, file.size) for file in checkpoint.files]
    return Task(loader, str(model), files, sorted(checkpoint.tensors), device=device)


@pytest.mark.parametrize(
    "loader",
    ["hotstart", "hotstart-buffered", "hotstart-direct", "plain ring buffered, 8 x 2 x 8 MiB"],
)
def test_readers_of_ours_bring_the_bytes_of_a_plain_read_onto_the_device(
    tiny_model: TinyModel, loader: str
) -> None:
    model = tiny_model("llama", dtype="bfloat16", shards=2)
    measured = run_once(task(loader, model, "fake"))
    assert not measured.error
    assert measured.digest == run_once(task("plain buffered, 2 x 4 MiB", model, "cpu")).digest
    assert measured.device_peak >= sum(ref.nbytes for ref in open_checkpoint(str(model)).tensors.values())


def test_what_ours_says_tells_how_it_read_and_why_not_directly(tiny_model: TinyModel) -> None:
    note = run_once(task("hotstart-buffered", tiny_model("llama", shards=2), "fake")).note
    assert note.startswith("direct: no, because it reads with the CPU: buffered (as ordered")
    assert note.endswith("through a ring of pinned memory")


def test_libraries_import_side_by_side_and_bring_the_same_bytes(tiny_model: TinyModel) -> None:
    model = tiny_model("llama", dtype="bfloat16", shards=2)
    names = [name for name in ("safetensors", "runai-copy", "fastsafetensors") if not NAMED[name].absent]
    asked: list[str] = []
    tasks = [task(name, model, "fake") for name in ("hotstart", *names)]
    measured = list(run_together(tasks, 300.0, lambda each: asked.append(each.loader)))
    assert asked == ["hotstart", *names]
    assert [each.error for each in measured] == [""] * len(tasks)
    assert len({each.digest for each in measured}) == 1
    assert all(each.note.startswith("direct: no, because ") for each in measured)


def test_one_that_fails_leaves_the_others_their_results(tiny_model: TinyModel, tmp_path: Path) -> None:
    good = task("hotstart", tiny_model(), "fake")
    gone = Task("hotstart", str(tmp_path), [], [], device="fake")
    failed, whole = run_together([gone, good], 300.0, lambda each: None)
    assert str(tmp_path) in failed.error
    assert whole.digest
    assert not whole.error


def test_bytes_read_back_are_those_that_are_touched_in_memory() -> None:
    device = FakeDevice()
    data = os.urandom(3 * 4096 + 7)
    buffer = device.pinned(len(data))
    buffer.view[:] = data
    address, stream = device.allocate(len(data)), device.stream()
    device.copy(address, buffer.address, len(data), stream)
    device.synchronize(stream)
    spans = {"whole": Span(address, len(data)), "part": Span(address + 1, 5), "empty": Span(address, 0)}
    found = {name: (touched, last) for name, touched, last in read_back(device, spans)}
    assert found["whole"] == (data[::4096], data[-1:])
    assert found["part"] == (data[1:2], data[5:6])
    assert found["empty"] == (b"", b"")


def test_memory_of_the_device_is_counted_from_when_the_clock_started() -> None:
    device = FakeDevice(context=1 << 30)
    device.attach()
    before = device.allocate(1 << 20)
    watch = MemoryWatch(device)
    device.allocate(3 << 20)
    assert watch.stop() == 3 << 20
    device.free(before)


def test_loaders_of_a_gpu_are_not_those_of_memory() -> None:
    chosen, _ = choose_loaders("file", [], kind="cuda")
    assert chosen[0] == "hotstart"
    assert "safetensors-copy" not in chosen
    assert not {name for name, reader in READERS.items() if set(reader.devices) == {"cpu", "cuda"}}
    with pytest.raises(ConfigError, match="--loader hotstart-map does not load into an NVIDIA GPU"):
        choose_loaders("file", ["hotstart-map"], kind="cuda")


def on_gpu() -> tuple[Runs, Subject]:
    runs = Runs("warm")
    runs.plain["plain ring buffered, 8 x 2 x 8 MiB"] = [Measurement(1.0, digest="a", device_peak=2_000)]
    runs.loaders["hotstart"] = [
        Measurement(0.5, digest="a", device_peak=2_000_000_000, note="direct: no, because of a test")
    ]
    runs.loaders["broken"] = [Measurement(error="no such thing")]
    files = [("/models/llama/model.safetensors", 2_000_000_000)]
    device = DeviceChoice(INFO, "--device cuda")
    return runs, Subject("/models/llama", "tmpfs", files, ["weight"], device=device)


def test_table_of_a_gpu_names_it_and_the_memory_it_took() -> None:
    text = load_report.table(*on_gpu())
    assert "\ninto cuda:0 NVIDIA H200, GPU-1\n" in text
    (head,) = [line for line in text.splitlines() if "seconds [min" in line]
    (ours,) = [line for line in text.splitlines() if line.startswith("hotstart  ")]
    assert head.endswith("peak GPU")
    assert ours.endswith("2.00 GB")
    assert "2.00" in ours.split()  # times the ceiling
    assert "hotstart: direct: no, because of a test" in text
    assert "failed: no such thing" in text


def test_json_of_a_gpu_has_the_device_and_every_peak() -> None:
    runs, subject = on_gpu()
    document = json.loads(load_report.as_json([runs], subject, {}))
    assert document["device"] == "cuda:0 NVIDIA H200, GPU-1"
    assert document["format"] == "safetensors"
    assert document["states"][0]["loaders"]["hotstart"][0]["device_peak"] == 2_000_000_000


@pytest.mark.gpu
def test_every_loader_that_is_installed_brings_the_same_bytes_into_a_gpu(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    names, _ = choose_loaders(
        "file", [name for name, each in NAMED.items() if "cuda" in each.devices], kind="cuda"
    )
    out = tmp_path / "load.json"
    words = ["--device", "cuda", "--loader", *names, "--iterations", "1", "--json", str(out)]
    assert load.main([str(tiny_model("llama", dtype="bfloat16", shards=2)), *words]) == 0
    (state,) = json.loads(out.read_text())["states"]
    assert {name: rounds[0]["error"] for name, rounds in state["loaders"].items()} == dict.fromkeys(names, "")
    assert all(rounds[0]["device_peak"] > 0 for rounds in state["loaders"].values())
