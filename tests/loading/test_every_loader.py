"""Every loader that runs here fills the store with the same bits, whatever layout and place it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree

import pytest

from hotstart.cli.main import main
from hotstart.config.load_formats import ACCEPTED, FORMATS, device_problem, place_problem
from loaded_weights import checksums, loaded
from object_servers import S3Server

Model = Callable[..., Path]
Layouts = Callable[[str, str], Path]
FAMILIES = [
    "llama",
    "llama-tied",
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "opt",
    "opt-post-norm",
    "opt-plain",
]
LAYOUTS = {"sharded_state": "sharded", "runai_streamer_sharded": "sharded", "tensorizer": "tensorizer"}
"""What ``hotstart convert`` writes for a format; the others read the plain checkpoint."""
READING = [name for name in ACCEPTED if name != "dummy"]
ON_CPU = [name for name in READING if device_problem(name, "cpu") is None]
FROM_STORES = [name for name in ON_CPU if place_problem(name, "s3") is None]


@pytest.fixture(scope="module")
def written(tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    """A family's model in the layout of a format; each layout is written once."""
    root = tmp_path_factory.mktemp("layouts")

    def get(family: str, load_format: str) -> Path:
        plain = tiny_model(family, dtype="bfloat16", shards=2)
        layout = LAYOUTS.get(load_format)
        if layout is None:
            return plain
        path = root / layout / family
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            assert main(["convert", layout, str(plain), str(path)]) == 0
        return path

    return get


@pytest.fixture(scope="module")
def store(written: Layouts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A bucket with a folder for each format."""
    root = tmp_path_factory.mktemp("store")
    for load_format in FROM_STORES:
        copytree(written("llama-tied", load_format), root / "models" / load_format)
    with S3Server(root) as server:
        yield server


@pytest.mark.parametrize("load_format", ON_CPU)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_gives_the_bits_that_our_own_reader_finds_in_the_plain_one(
    family: str, load_format: str, written: Layouts
) -> None:
    ours = loaded(written(family, "auto"))
    theirs = loaded(written(family, load_format), load_format)
    assert checksums(theirs.slots) == checksums(ours.slots)


@pytest.mark.parametrize("load_format", FROM_STORES)
def test_a_store_gives_the_bits_of_a_directory(
    load_format: str,
    written: Layouts,
    store: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in store.environ.items():
        monkeypatch.setenv(name, value)
    path = written("llama-tied", load_format)
    theirs = loaded(path, load_format, location=f"s3://models/{load_format}")
    assert checksums(theirs.slots) == checksums(loaded(written("llama-tied", "auto")).slots)


@pytest.mark.gpu
@pytest.mark.parametrize("load_format", READING)
def test_a_gpu_gets_the_bits_that_memory_gets(load_format: str, written: Layouts) -> None:
    pytest.importorskip(FORMATS[load_format].library or "hotstart")
    theirs = loaded(written("qwen2", load_format), load_format, device="cuda")
    assert checksums(theirs.slots) == checksums(loaded(written("qwen2", "auto")).slots)
