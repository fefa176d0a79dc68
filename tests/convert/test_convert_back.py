"""``hotstart convert safetensors`` of files for ranks and of Tensorizer files: the plain model again."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import tiny_models
from hotstart.checkpoint.tensorizer import open_tensorizer
from hotstart.cli.main import main
from object_servers import NanioServer
from tensorizer_files import write_tensorizer

RECORDED = Path(__file__).parents[1] / "recorded"
NAMES = ("llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "opt")


def convert(kind: str, *words: str | Path) -> int:
    return main(["convert", kind, *map(str, words)])


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, as ``hotstart convert safetensors`` writes them."""
    folder, found = tmp_path_factory.mktemp("back"), {}
    for name in NAMES:
        source = tiny_models.write(name, folder / f"{name}-made")
        found[name] = folder / name
        assert convert("safetensors", source, found[name]) == 0
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_what_was_cut_for_ranks_is_joined_to_the_byte(
    name: str, ranks: int, stages: int, models: dict[str, Path], tmp_path: Path
) -> None:
    flags = ("--tensor-parallel-size", str(ranks), "--pipeline-parallel-size", str(stages))
    assert convert("sharded", models[name], tmp_path / "cut", *flags, "--shard-size", "50kB") == 0
    assert convert("safetensors", tmp_path / "cut", tmp_path / "back", "--memory-limit", "1MiB") == 0
    assert snapshot(tmp_path / "back") == snapshot(models[name])


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ("llama-tied-tp1-pp1", "llama-tied"),
        ("llama-tied-tp1-pp2", "llama-tied"),
        ("qwen2-tp2-pp1", "qwen2"),
        ("qwen2-tp4-pp1", "qwen2"),
    ],
)
def test_what_vllm_cut_is_joined(state: str, name: str, tmp_path: Path) -> None:
    source = shutil.copytree(RECORDED / state, tmp_path / "cut")
    shutil.copy(RECORDED / name / "config.json", source)
    assert convert("safetensors", source, tmp_path / "back") == 0
    assert convert("safetensors", RECORDED / name, tmp_path / "plain") == 0
    written, plain = (tmp_path / each / "model.safetensors" for each in ("back", "plain"))
    assert written.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tensorizer_files_are_joined_to_the_byte(
    name: str, ranks: int, models: dict[str, Path], tmp_path: Path
) -> None:
    flags = ("--tensor-parallel-size", str(ranks))
    assert convert("tensorizer", models[name], tmp_path / "other", *flags) == 0
    assert convert("safetensors", tmp_path / "other", tmp_path / "back") == 0
    assert snapshot(tmp_path / "back") == snapshot(models[name])


@pytest.mark.parametrize("kind", ["tensorizer", "sharded"])
def test_what_vllm_wrote_of_a_padded_vocabulary_is_joined(kind: str, tmp_path: Path) -> None:
    """Seventy tokens, of which vLLM makes 128; the file of Tensorizer's has the tied head twice."""
    plain, source = tmp_path / "plain", tmp_path / "cut"
    plain.mkdir()
    if kind == "sharded":
        shutil.copytree(RECORDED / "vocab-70-tp2-pp1", source)
    else:
        source.mkdir()
        data = gzip.decompress((RECORDED / "vocab-70.tensors.gz").read_bytes())
        (source / "vocab.tensors").write_bytes(data)
    config = RECORDED / "vocab-70/config.json"
    for directory in (plain, source):
        shutil.copy(config, directory)
    tiny_models.write_weights(plain, json.loads(config.read_text()), dtype="bfloat16")
    for directory in (plain, source):
        assert convert("safetensors", directory, tmp_path / f"{directory.name}-new") == 0
    assert snapshot(tmp_path / "cut-new") == snapshot(tmp_path / "plain-new")


def test_tensors_under_their_own_names_keep_them(models: dict[str, Path], tmp_path: Path) -> None:
    write_tensorizer(models["llama"], tmp_path / "other")
    assert convert("safetensors", tmp_path / "other", tmp_path / "back") == 0
    assert snapshot(tmp_path / "back") == snapshot(models["llama"])


@pytest.mark.parametrize("kind", ["sharded", "tensorizer"])
def test_they_come_back_from_a_store(
    kind: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "store/models"
    bucket.mkdir(parents=True)
    assert convert(kind, models["llama-tied"], bucket / "other", "--tensor-parallel-size", "2") == 0
    with NanioServer(bucket.parent) as server:
        for name, value in {**server.environ, "HOTSTART_CACHE_ROOT": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        assert convert("safetensors", "s3://models/other", tmp_path / "back") == 0
    assert snapshot(tmp_path / "back") == snapshot(models["llama-tied"])


@pytest.fixture(scope="module")
def encrypted(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encrypted")
    (folder / "key").write_bytes(bytes(range(32)))
    flags = ("--encrypt", folder / "key", "--tensor-parallel-size", "2")
    assert convert("tensorizer", models["qwen2"], folder / "other", *flags) == 0
    return folder


def test_an_encrypted_file_is_decrypted_with_its_key(
    encrypted: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    flags = ("--decrypt", encrypted / "key")
    assert convert("safetensors", encrypted / "other", tmp_path / "back", *flags) == 0
    assert snapshot(tmp_path / "back") == snapshot(models["qwen2"])


def test_without_the_key_the_flag_that_names_it_is_told(
    encrypted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("safetensors", encrypted / "other", tmp_path / "back") == 3
    error = capsys.readouterr().err
    assert "is encrypted, and there is no key; expected --decrypt" in error
    assert "Pass --decrypt PATH" in error


def test_another_key_is_told_from_damage(
    encrypted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_bytes(bytes(32))
    flags = ("--decrypt", tmp_path / "key")
    assert convert("safetensors", encrypted / "other", tmp_path / "back", *flags) == 3
    assert f"cannot be decrypted with {tmp_path / 'key'}" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_a_key_for_a_plain_checkpoint_is_refused(
    encrypted: Path, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--decrypt", encrypted / "key")
    assert convert("safetensors", models["llama"], tmp_path / "back", *flags) == 2
    assert "is for Tensorizer files" in capsys.readouterr().err


def test_a_damaged_tensorizer_file_is_named_with_its_tensor(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("tensorizer", models["llama"], tmp_path / "other") == 0
    path = tmp_path / "other/model.tensors"
    ref = open_tensorizer(str(path.parent)).tensors["lm_head.weight"]
    with open(path, "r+b") as file:
        file.seek(ref.offset + ref.nbytes // 2)
        file.write(b"damage")
    assert convert("safetensors", tmp_path / "other", tmp_path / "back") == 3
    assert f"{path} is damaged: the tensor lm_head.weight has not the hash" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.qkv_proj.weight"])
def test_ranks_that_differ_where_they_must_not_are_refused_with_the_tensor(
    name: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of four ranks each holds a key/value head that a neighbour holds too."""
    convert("sharded", models["llama"], tmp_path / "cut", "--tensor-parallel-size", "4")
    path = tmp_path / "cut/model-rank-3-part-0.safetensors"
    tensors = load_file(path)
    tensors[name][-1] += 1
    save_file(tensors, path)
    assert convert("safetensors", tmp_path / "cut", tmp_path / "back") == 3
    stored = name.replace("qkv_proj", "v_proj")
    assert f"{stored} cannot be joined: what ranks must hold alike of it differs" in capsys.readouterr().err


def test_an_absent_rank_is_named(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, name in (
        ("sharded", "model-rank-0-part-0.safetensors"),
        ("tensorizer", "model-rank-000.tensors"),
    ):
        convert(kind, models["llama"], tmp_path / kind, "--tensor-parallel-size", "2")
        (tmp_path / kind / name).unlink()
        assert convert("safetensors", tmp_path / kind, tmp_path / "back") == 3
        assert name.partition("-part")[0] in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sharded", "tensorizer"])
def test_other_conversions_of_them_are_refused_with_the_way(
    kind: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in ("sharded", "tensorizer"):
        convert(source, models["llama"], tmp_path / source)
        capsys.readouterr()
        assert convert(kind, tmp_path / source, tmp_path / "new") == 3
        assert (
            f"Write one first: hotstart convert safetensors {tmp_path / source} DST"
            in capsys.readouterr().err
        )
