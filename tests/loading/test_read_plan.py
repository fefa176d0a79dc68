"""The read plan in words, what is expected of a medium, and what is remembered of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_files import file_of
from hotstart.checkpoint.base import Checkpoint, ShardFile
from hotstart.checkpoint.folder import LocalFolder
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.loading.choice import Choice
from hotstart.loading.explain import FilePlan, Plan, lines, plan_of, short
from hotstart.loading.image import Image
from hotstart.loading.options import Ring
from hotstart.loading.probe import probe
from hotstart.loading.rates import Rate, recall, record
from hotstart.storage import mounts
from hotstart.storage.mounts import mount_of
from hotstart.storage.source import Cancel, FileSource, Source

TinyModel = Callable[..., Path]
GB = 10**9


def text_of(plan: Plan, topic: str, rate: float = GB) -> str:
    rates = [Rate(rate, 0.0)] * len(plan.groups)
    return "\n".join(text for each, text in lines(plan, rates) if each == topic)


def store_checkpoint(size: int) -> Checkpoint:
    return Checkpoint("s3://b/m", (ShardFile("s3://b/m/model.safetensors", size, 8),), {})


@pytest.mark.parametrize("strategy", ["auto", "map", "buffered"])
def test_plan_is_what_the_load_will_do(tiny_model: TinyModel, strategy: str) -> None:
    checkpoint = open_checkpoint(str(tiny_model("llama", shards=2)))
    image = Image(checkpoint, strategy=strategy)
    image.close()
    plan = plan_of(checkpoint, strategy=strategy)
    assert [(each.choice.strategy, each.choice.reason) for each in plan.files] == [
        (choice.strategy, choice.reason) for choice in image.choices
    ]


def test_medium_of_a_file_is_its_mount(tiny_model: TinyModel) -> None:
    model = tiny_model()
    mount = mount_of(str(model))
    assert mount is not None
    assert text_of(plan_of(open_checkpoint(str(model))), "medium").endswith(mount.describe())


def test_mounts_are_read_once_for_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model-{number:05}-of-00200.safetensors" for number in range(1, 201)]
    for name in names:
        (tmp_path / name).write_bytes(
            file_of({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x")
        )
    checkpoint = open_checkpoint(str(tmp_path))
    read: list[str] = []
    monkeypatch.setattr(mounts, "mounts", lambda table, real=mounts.mounts: read.append(table) or real(table))
    assert len(plan_of(checkpoint).files) == 200
    assert len(read) == 1
    Image(checkpoint).close()
    assert len(read) == 2


def test_medium_of_an_object_is_its_store_and_its_reads_are_ranges() -> None:
    plan = plan_of(store_checkpoint(4 * GB), store="S3 at http://store, region eu-west-2")
    assert text_of(plan, "medium") == "1 file, 4.00 GB: S3 at http://store, region eu-west-2"
    assert text_of(plan, "strategy").startswith("ranges: ")
    assert text_of(plan, "reads").startswith("8 in flight at first, up to 64")


def test_small_model_has_no_more_reads_in_flight_than_parts() -> None:
    assert text_of(plan_of(store_checkpoint(10_000)), "reads").startswith("1 in flight, ")


def test_ordered_concurrency_is_the_number_in_flight() -> None:
    assert text_of(plan_of(store_checkpoint(4 * GB), readers=5), "reads").startswith("5 in flight, ")


def test_expected_seconds_are_bytes_over_rate_with_the_origin_of_the_rate() -> None:
    plan = plan_of(store_checkpoint(4 * GB))
    assert text_of(plan, "expected", rate=2 * GB) == (
        "2.00 s: 2.00 GB/s in the best of earlier starts (1970-01-01)"
    )


def test_what_the_page_cache_has_of_a_file_is_not_counted_as_read() -> None:
    file = ShardFile("/m/a.safetensors", 4 * GB, 0)
    choice = Choice("map", "a test", resident=0.75)
    plan = Plan((FilePlan(file, "a disk", choice),), 4, 4, 8 << 20)
    assert text_of(plan, "expected", rate=GB).startswith("1.00 s: ")


def test_staging_memory_of_a_gpu_is_told() -> None:
    plan = plan_of(store_checkpoint(4 * GB), ring=Ring(8, 2, 8 << 20, limit=1 << 30))
    said = r"134 MB of pinned staging memory \(8 x 2 x 8\.39 MB\) of at most 1\.07 GB on this machine; "
    assert re.match(said + r".* free of .* \(", text_of(plan, "memory"))
    assert re.search(said, short(plan, [None]))


def test_files_of_a_gpu_are_never_mapped(tiny_model: TinyModel) -> None:
    checkpoint = open_checkpoint(str(tiny_model()))
    plan = plan_of(checkpoint, ring=Ring(8, 2, 8 << 20))
    [choice] = [each.choice for each in plan.files]
    assert choice.strategy in ("buffered", "direct")
    assert choice.reason == plan_of(checkpoint).files[0].choice.reason
    ordered = plan_of(checkpoint, strategy="direct", ring=Ring(8, 2, 8 << 20))
    assert text_of(ordered, "strategy") == "direct: as ordered by --read-strategy"


def test_memory_of_mapped_files_is_the_page_cache(tiny_model: TinyModel) -> None:
    plan = plan_of(open_checkpoint(str(tiny_model())), strategy="map")
    assert "shared with the page cache" in text_of(plan, "memory")


def test_line_of_a_start_promises_seconds_only_when_each_medium_is_known() -> None:
    plan = plan_of(store_checkpoint(4 * GB), store="a store")
    assert "expected" not in short(plan, [None])
    assert "expected 4.00 s" in short(plan, [Rate(GB, 0.0)])
    assert "1 file ranges from a store" in short(plan, [None])


class Counting(LocalFolder):
    """A folder that counts what is read of its files."""

    read = 0

    def source(self, file: ShardFile, *, direct: bool = False) -> Source:
        folder = self

        class Counted(FileSource):
            def read_into(self, buffer: memoryview, offset: int, cancel: Cancel) -> None:
                folder.read += len(buffer)
                super().read_into(buffer, offset, cancel)

        return Counted(file.path, direct=direct)


@pytest.mark.parametrize("strategy", ["buffered", "direct"])
def test_probe_reads_a_few_megabytes_however_large_the_model(tmp_path: Path, strategy: str) -> None:
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as opened:
        opened.truncate(1 << 30)
    folder = Counting(str(tmp_path))
    checkpoint = Checkpoint(str(tmp_path), (ShardFile(str(file), 1 << 30, 8),), {}, folder=folder)
    found = probe(checkpoint, checkpoint.files, strategy, 64)
    assert 0 < folder.read <= 64 << 20
    assert found.rate > 0
    assert found.origin.startswith("by a probe of ")


@pytest.mark.parametrize("strategy", ["map", "buffered", "direct"])
def test_model_smaller_than_a_probe_is_read_once(tiny_model: TinyModel, strategy: str) -> None:
    checkpoint = open_checkpoint(str(tiny_model("llama", shards=2)))
    assert probe(checkpoint, checkpoint.files, strategy, 4).rate > 0


def test_best_rate_of_a_medium_is_remembered(tmp_path: Path) -> None:
    root = str(tmp_path)
    for seconds in (2.0, 1.0, 4.0):
        record(root, "a disk", "direct", GB, seconds)
    best = recall(root, "a disk", "direct")
    assert best is not None
    assert best.rate == GB
    assert recall(root, "a disk", "map") is None
    assert recall(root, "another disk", "direct") is None


def test_what_a_store_is_called_is_not_written_down(tmp_path: Path) -> None:
    record(str(tmp_path), "S3 with the key AKIAEXAMPLE", "ranges", GB, 1.0)
    (file,) = tmp_path.iterdir()
    assert "AKIAEXAMPLE" not in file.read_text()


def test_small_loads_say_nothing_of_a_medium(tmp_path: Path) -> None:
    record(str(tmp_path), "a disk", "direct", 1_000_000, 0.001)
    assert recall(str(tmp_path), "a disk", "direct") is None


@pytest.mark.parametrize("content", ["", "{", '{"x": {"rate": 0, "at": 1}}', "[]", '{"x": 1}'])
def test_damaged_memory_is_no_memory_and_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "read-rates.json").write_text(content)
    assert recall(str(tmp_path), "a disk", "direct") is None
    record(str(tmp_path), "a disk", "direct", GB, 1.0)
    assert recall(str(tmp_path), "a disk", "direct") is not None


def test_cache_root_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    record(str(tmp_path / "gone"), "a disk", "direct", GB, 1.0)
    record("", "a disk", "direct", GB, 1.0)
    assert recall("", "a disk", "direct") is None


def test_memory_does_not_grow_without_end(tmp_path: Path) -> None:
    for number in range(80):
        record(str(tmp_path), f"disk {number}", "direct", GB, 1.0)
    assert len(json.loads((tmp_path / "read-rates.json").read_text())) == 64
    assert recall(str(tmp_path), "disk 79", "direct") is not None
