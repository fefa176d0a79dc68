"""A model on a mount that is far, slow, stubborn or broken: a real FUSE file system under a real load."""

from __future__ import annotations

import errno
import mmap
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_models
from checkpoint_files import shard_name, write_index, write_model, write_shard
from fuse_pass_through import SUBTYPE, Mount, mounted
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.errors import StorageError
from hotstart.loading.image import STEP, Image
from running_server import RunningServer

MB = 1 << 20
SHARD = 24 * MB
NAMES = [shard_name(number, 2) for number in (1, 2)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of three steps each, and nothing but weights."""
    directory = tmp_path_factory.mktemp("shards")
    for number, name in enumerate(NAMES):
        content = random.Random(number).randbytes(SHARD)
        write_shard(directory / name, {f"w{number}": ("BF16", (SHARD // 2,))}, {f"w{number}": content})
    write_index(directory, {"w0": NAMES[0], "w1": NAMES[1]})
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be served, of 13 MB in two shards."""
    directory = tmp_path_factory.mktemp("served") / "model"
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
    write_model(directory, vocab_size=tiny_models.VOCAB, **shape)
    tiny_models.write_tokenizer(directory)
    return directory


def load(
    mount: Mount, *, patience: float = 60.0, strategy: str = "auto", readers: int | None = None
) -> Image:
    checkpoint = open_checkpoint(str(mount.path))
    image = Image(checkpoint, strategy=strategy, readers=readers, patience=patience)
    image.start()
    try:
        image.wait()
    finally:
        image.cancel()
    return image


def assert_same(image: Image, directory: Path) -> None:
    for number, name in enumerate(NAMES):
        content = (directory / name).read_bytes()
        assert image.memory(number)[: len(content)] == content
    image.close()


def test_few_large_reads_in_order_although_each_costs_milliseconds(shards: Path, tmp_path: Path) -> None:
    with mounted(shards, tmp_path / "far", delay=0.005) as mount:
        image = load(mount)
        assert_same(image, shards)
        weights = [read for read in mount.reads() if read.size > 128 << 10]
        small = [read for read in mount.reads() if read.size <= 128 << 10]
    assert f"direct (fuse.{SUBTYPE} gets large ordered reads) x2" in image.describe()
    size = sum((shards / name).stat().st_size for name in NAMES)
    assert sum(read.size for read in weights) >= size - 2 * STEP // 8
    assert len(weights) <= size / MB + 6
    assert len(small) < 12  # headers, and the last page of each file
    for handle in {read.handle for read in weights}:
        steps = [(read.name, read.offset // STEP) for read in weights if read.handle == handle]
        assert steps == sorted(steps)


def test_files_on_a_mount_are_never_mapped_even_when_they_are_in_the_page_cache(
    shards: Path, tmp_path: Path
) -> None:
    with mounted(shards, tmp_path / "far", keeps_pages=True) as mount:
        for name in NAMES:
            (mount.path / name).read_bytes()
        before = len(mount.reads())
        image = load(mount)
        assert_same(image, shards)
        again = [read for read in mount.reads()[before:] if read.size > 64 << 10]
    assert {choice.strategy for choice in image.choices} == {"buffered"}
    assert again == []


def test_each_reader_has_a_descriptor_of_its_own(shards: Path, tmp_path: Path) -> None:
    """A file server that limits what one open file gets is used by several at once, inside a file too."""
    with mounted(shards, tmp_path / "limited", handle_rate=50e6) as mount:
        assert_same(load(mount), shards)
        by_handle: dict[tuple[str, int], int] = {}
        for read in mount.reads():
            key = (read.name, read.handle)
            by_handle[key] = by_handle.get(key, 0) + read.size
    large = [key for key, size in by_handle.items() if size >= 4 * MB]
    assert len(large) >= 5
    assert {name for name, _ in large} == set(NAMES)
    assert max(by_handle.values()) <= 2 * STEP


def test_direct_reads_that_a_mount_refuses_are_replaced_with_one_line_that_names_it(
    shards: Path, tmp_path: Path
) -> None:
    with mounted(shards, tmp_path / "stubborn", direct=False) as mount:
        with pytest.raises(OSError, match="Invalid argument"):
            os.open(mount.path / NAMES[0], os.O_RDONLY | os.O_DIRECT)
        image = load(mount)
        assert_same(image, shards)
    [line] = image.describe().split(", ")
    where = f"fuse.{SUBTYPE} mounted at {mount.path}"
    assert line == f"buffered ({where} has no direct reads (O_DIRECT)) x2"


def test_a_server_starts_from_a_mount_that_cannot_be_mapped(model: Path, tmp_path: Path) -> None:
    with mounted(model, tmp_path / "stubborn", mapped=False) as mount:
        with (mount.path / "config.json").open("rb") as file:
            with pytest.raises(OSError) as refused:
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, flags=mmap.MAP_SHARED)
            assert refused.value.errno == errno.ENODEV
        with RunningServer(mount.path, "--threads", "1", log=tmp_path / "log") as server:
            server.until_ready()
            assert server.complete()["usage"]["completion_tokens"] == 8
            assert f"fuse.{SUBTYPE}" in server.output
            assert "No such device" not in server.output


@pytest.mark.parametrize(
    ("code", "words", "advice"),
    [
        (errno.EIO, "Input/output error", "dmesg"),
        (errno.ESTALE, "Stale file handle", "replaced on the server"),
    ],
)
def test_a_read_that_fails_is_named_with_file_and_offset(
    code: int, words: str, advice: str, shards: Path, tmp_path: Path
) -> None:
    with mounted(shards, tmp_path / "broken", fails=(NAMES[1], 10 * MB, code)) as mount:
        with pytest.raises(StorageError) as raised:
            load(mount)
        said = re.fullmatch(
            rf"Cannot read {re.escape(str(mount.path / NAMES[1]))} at byte (\d+): {words}", raised.value.found
        )
        assert said
        assert 8 * MB <= int(said[1]) <= SHARD
        assert advice in raised.value.advice


def test_a_read_that_hangs_is_named_and_taken_over_on_a_new_descriptor(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(shards, tmp_path / "hanging", stuck_from=(NAMES[0], 20 * MB, 1)) as mount:
        image = load(mount, patience=1.0)
        assert mount.stuck() > 0
        mount.answer()
        assert_same(image, shards)
    path = re.escape(str(mount.path / NAMES[0]))
    assert re.search(
        rf"{path} gives no byte at offset \d+ since 1\.\d+ s: reading on with a new", caplog.text
    )


def test_storage_that_hangs_for_good_ends_the_start_after_one_more_try(model: Path, tmp_path: Path) -> None:
    """Even opening the file again does not come back here."""
    with mounted(model, tmp_path / "hanging", stuck_after=7 * MB) as mount:
        flags = ("--threads", "1", "--storage-timeout", "0.5")
        with RunningServer(mount.path, *flags, log=tmp_path / "log") as server:
            assert server.process.wait(30) == 4
            assert mount.stuck() > 0
            output = server.output
    path = re.escape(str(mount.path / "model"))
    assert re.search(rf"WARN.*{path}\S+ gives no byte at offset \d+ since [\d.]+ m?s", output)
    assert re.search(rf"{path}\S+ gave no byte at offset \d+ for [\d.]+ m?s, and none on a new", output)


def test_slow_storage_that_moves_is_never_given_up(shards: Path, tmp_path: Path) -> None:
    """The load takes several times the patience."""
    with mounted(shards, tmp_path / "slow", handle_rate=8e6) as mount:
        assert_same(load(mount, patience=0.7, readers=2), shards)


@pytest.mark.parametrize("end", [Mount.unmount, Mount.kill])
def test_a_mount_that_goes_away_in_the_middle_of_a_load_ends_it_with_the_cause(
    end: Callable[[Mount], None], model: Path, tmp_path: Path
) -> None:
    with mounted(model, tmp_path / "gone", stuck_after=7 * MB) as mount:
        with RunningServer(mount.path, "--threads", "1", log=tmp_path / "log") as server:
            server.until(lambda: mount.stuck() > 0)
            end(mount)
            assert server.process.wait(30) == 4
            last = "\n".join(server.output.splitlines()[-3:])
    assert re.search(rf"Cannot (read|open) {re.escape(str(mount.path))}/model\S+", last)
    assert "unmounted" in last
