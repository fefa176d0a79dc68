"""A model that is not whole is refused with the same words from a directory, a bucket and a web server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_models
from checkpoint_files import (
    CONFIG,
    STUB,
    read_index,
    shard_name,
    weights,
    write_index,
    write_model,
    write_shard,
)
from fault_proxy import Fault, FaultServer
from hotstart.checkpoint.safetensors import read_header
from hotstart.cli.check import Report, run_checks
from hotstart.config.settings import Config, ModelConfig
from object_servers import KEY, SECRET, S3Server

FIRST, SECOND, THIRD = (shard_name(number, 2) for number in (1, 2, 3))
CONFIGURED = {**CONFIG, "vocab_size": tiny_models.VOCAB}
TENSORS = len(weights(CONFIGURED))
TRUE_SIZE = "4976698672 bytes (4.98 GB)"


class Place:
    """A model that a test spoils in its directory and that is then looked at where it lies."""

    def __init__(self, kind: str, directory: Path, store: S3Server) -> None:
        self.kind = kind
        self.directory = directory
        self._store = store

    def check(self, monkeypatch: pytest.MonkeyPatch, **settings: bool) -> Report:
        """What ``hotstart check`` finds."""
        if self.kind != "http":
            for name, value in self._store.environ.items():
                monkeypatch.setenv(name, value)
            self.address = f"s3://models/{self.directory.name}" if self.kind == "s3" else str(self.directory)
            return self._checked(**settings)
        files = {f"m/{path.name}": path.read_bytes() for path in self.directory.iterdir()}
        with FaultServer(files) as server:
            self.address = f"{server.url}/m"
            return self._checked(**settings)

    def refused(self, monkeypatch: pytest.MonkeyPatch, **settings: bool) -> list[str]:
        """The problems, each of which names a file by its address."""
        problems = [str(problem) for problem in self.check(monkeypatch, **settings).problems]
        assert not any("/small-files/" in problem for problem in problems)
        return problems

    def _checked(self, **settings: bool) -> Report:
        return run_checks(Config(model=ModelConfig(model=self.address, **settings)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("whole") / "m", vocab_size=tiny_models.VOCAB)
    tiny_models.write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, Path]]:
    root = tmp_path_factory.mktemp("buckets")
    (root / "models").mkdir()
    with S3Server(root) as server:
        yield server, root / "models"


@pytest.fixture(params=["directory", "s3", "http"])
def place(
    request: pytest.FixtureRequest,
    whole: Path,
    store: tuple[S3Server, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    """A copy of a whole model in two shards."""
    monkeypatch.setenv("HOTSTART_CACHE_ROOT", str(tmp_path / "cache"))
    server, bucket = store
    directory = bucket / tmp_path.name
    shutil.copytree(whole, directory)
    return Place(request.param, directory, server)


def test_a_whole_model_has_no_problems(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.refused(monkeypatch) == []


@pytest.mark.parametrize("left", ["all but a byte", "a part of the header", 7, 0])
def test_a_cut_shard_is_told_with_both_sizes_and_the_likely_cause(
    left: int | str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = place.directory / SECOND
    size = shard.stat().st_size
    kept = {"all but a byte": size - 1, "a part of the header": 100}.get(str(left), left)
    assert isinstance(kept, int)
    os.truncate(shard, kept)
    [problem] = place.refused(monkeypatch)
    assert f"{place.address}/{SECOND}" in problem
    assert f"{kept} bytes" in problem
    assert {"all but a byte": f"expected {size} bytes", "a part of the header": "expected a header of "}.get(
        str(left), "at least 8 bytes"
    ) in problem
    assert "The copy or download was probably interrupted" in problem


def test_every_bad_shard_is_told(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(place.directory / FIRST, 7)
    os.truncate(place.directory / SECOND, (place.directory / SECOND).stat().st_size - 1)
    problems = place.refused(monkeypatch)
    assert [name in problem for name, problem in zip((FIRST, SECOND), problems, strict=True)] == [True] * 2


@pytest.mark.parametrize("quantised", [False, True])
def test_an_absent_shard_that_the_index_names_is_an_error_for_every_kind_of_model(
    quantised: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = {f"model.layers.{layer}.mlp.up_proj.weight": THIRD for layer in (7, 8)}
    write_index(place.directory, {**read_index(place.directory), **third})
    if quantised:
        config = json.loads((place.directory / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        (place.directory / "config.json").write_text(json.dumps(config))
    problems = place.refused(monkeypatch)
    [absent] = [problem for problem in problems if "absent file" in problem]
    assert f"{place.address}/model.safetensors.index.json names 1 absent file ({THIRD})" in absent
    assert f"hold {TENSORS} of {TENSORS + 2} expected tensors" in absent
    assert "Copy or download the absent files" in absent
    assert "--ignore-index" not in absent
    assert (len(problems) > 1) == quantised


def test_a_pointer_stub_is_told_with_the_true_size_and_what_to_do(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (FIRST, "tokenizer.json"):
        (place.directory / name).write_bytes(STUB)
    problems = place.refused(monkeypatch)
    for problem, name in zip(sorted(problems), sorted([FIRST, "tokenizer.json"]), strict=True):
        assert f"{place.address}/{name} is a pointer stub" in problem
        assert TRUE_SIZE in problem
        assert "git lfs install && git lfs pull" in problem
        assert "Synced from a bucket: " in problem


def resharded(directory: Path, *, without: str = "") -> None:
    """Three complete files under new names beside the index of the two that were there."""
    tensors = weights(CONFIGURED)
    tensors.pop(without, None)
    for name in (FIRST, SECOND):
        (directory / name).unlink()
    names = list(tensors)
    for number in (1, 2, 3):
        part = names[len(names) * (number - 1) // 3 : len(names) * number // 3]
        write_shard(directory / shard_name(number, 3), {name: tensors[name] for name in part})


# Those whose files can be place.
listed = pytest.mark.parametrize("place", ["directory", "s3"], indirect=True)


@listed
def test_an_old_index_beside_complete_files_is_told_with_the_way_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    resharded(place.directory)
    [problem] = place.refused(monkeypatch)
    assert f"names 2 absent files ({FIRST}, {SECOND})" in problem
    assert f"hold {TENSORS} of {TENSORS} expected tensors" in problem
    assert "pass --ignore-index" in problem


@listed
def test_the_way_out_of_an_old_index_reads_the_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    resharded(place.directory)
    report = place.check(monkeypatch, ignore_index=True)
    assert report.problems == []
    assert report.checkpoint is not None
    assert [Path(file.path).name for file in report.checkpoint.files] == [
        shard_name(number, 3) for number in (1, 2, 3)
    ]


@listed
def test_no_way_out_of_an_old_index_is_offered_where_a_tensor_is_in_no_file(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    resharded(place.directory, without="lm_head.weight")
    [problem] = place.refused(monkeypatch)
    assert f"hold {TENSORS - 1} of {TENSORS} expected tensors" in problem
    assert "--ignore-index" not in problem
    problems = " ".join(place.refused(monkeypatch, ignore_index=True))
    assert "lm_head.weight" in problems


def test_an_old_index_on_a_web_server_is_an_incomplete_copy(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSTART_CACHE_ROOT", str(tmp_path / "cache"))
    directory = Path(shutil.copytree(whole, tmp_path / "m"))
    resharded(directory)
    files = {f"m/{path.name}": path.read_bytes() for path in directory.iterdir()}
    with FaultServer(files) as server:
        config = ModelConfig(model=f"{server.url}/m")
        [problem] = run_checks(Config(model=config)).problems
        assert f"names 2 absent files ({FIRST}, {SECOND}); files there hold 0 of {TENSORS}" in problem.found
        [problem] = run_checks(Config(model=ModelConfig(model=config.model, ignore_index=True))).problems
        assert "There is no model.safetensors in" in problem.found
        assert "cannot be listed" in problem.expected


def test_an_absent_shard_is_told_though_the_store_may_not_be_listed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSTART_CACHE_ROOT", str(tmp_path / "cache"))
    files = {f"models/m/{path.name}": path.read_bytes() for path in whole.iterdir() if path.name != SECOND}
    held = len(read_header(str(whole / FIRST)).tensors)
    denied = Fault(status=403, body=b"<Error><Code>AccessDenied</Code></Error>")
    denied.if_range = lambda begin, end: end == 1 << 62
    with FaultServer(files, denied) as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }.items():
            monkeypatch.setenv(name, value)
        problems = run_checks(Config(model=ModelConfig(model="s3://models/m"))).problems
    assert [problem.found for problem in problems] == [
        f"s3://models/m/model.safetensors.index.json names 1 absent file ({SECOND}); "
        f"files there hold {held} of {TENSORS} expected tensors"
    ]
