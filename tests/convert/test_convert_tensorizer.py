"""``hotstart convert tensorizer``: files that the library itself reads, hashed, and encrypted if asked."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorizer import DecryptionParams, TensorDeserializer

from hotstart.cli.main import main

RECORDED = Path(__file__).parents[1] / "recorded"
MARKER = ".vllm_tensorized_marker"


def convert(name: str, target: Path, *flags: str) -> int:
    return main(["convert", "tensorizer", str(RECORDED / name), str(target), *flags])


def load(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """With every hash checked."""
    with TensorDeserializer(str(path), device="cpu", verify_hash=True, lazy_load=True, **options) as file:
        return {str(name): file[name] for name in file.keys() if str(name) != MARKER}  # noqa: SIM118


@pytest.mark.parametrize(
    ("state", "file"),
    [
        ("llama-tied-tp1-pp1/model-rank-0-part-0.safetensors", "model.tensors"),
        ("qwen2-tp2-pp1/model-rank-0-part-0.safetensors", "model-rank-000.tensors"),
        ("qwen2-tp2-pp1/model-rank-1-part-0.safetensors", "model-rank-001.tensors"),
    ],
)
def test_a_file_holds_what_vllm_saves_of_a_rank(state: str, file: str, tmp_path: Path) -> None:
    ranks = "1" if file == "model.tensors" else "2"
    assert convert(state.partition("-tp")[0], tmp_path / "new", "--tensor-parallel-size", ranks) == 0
    written, saved = load(tmp_path / "new" / file), load_file(RECORDED / state)
    tied = {"model.embed_tokens.weight": saved["lm_head.weight"]} if ranks == "1" else {}
    assert written.keys() == saved.keys() | tied.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in {**saved, **tied}.items())


def test_vllm_finds_its_marker(tmp_path: Path) -> None:
    convert("qwen2", tmp_path / "new")
    with TensorDeserializer(str(tmp_path / "new/model.tensors"), device="cpu", lazy_load=True) as file:
        assert MARKER in file


def test_an_encrypted_file_opens_with_its_key_alone(tmp_path: Path) -> None:
    key = bytes(range(32))
    (tmp_path / "key").write_bytes(key)
    assert convert("qwen2", tmp_path / "new", "--encrypt", str(tmp_path / "key")) == 0
    convert("qwen2", tmp_path / "open")
    path = tmp_path / "new/model.tensors"
    decrypted, plain = (
        load(path, encryption=DecryptionParams.from_key(key)),
        load(tmp_path / "open/model.tensors"),
    )
    assert decrypted.keys() == plain.keys()
    assert all(torch.equal(decrypted[name], plain[name]) for name in plain)
    with pytest.raises(Exception, match=r"(?i)crypt"):
        load(path, encryption=DecryptionParams.from_key(bytes(32)))


def no_file(path: Path) -> None:
    """Nothing is there."""


def short(path: Path) -> None:
    path.write_bytes(b"short")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (no_file, "cannot be read: No such file"),
        (short, "has 5 bytes"),
        (Path.mkdir, "is a directory"),
        (os.mkfifo, "is no regular file"),
        (link_to_nothing, "cannot be read: No such file"),
    ],
)
def test_what_is_no_key_is_refused_and_the_way_to_make_one_overwrites_nothing(
    make: Callable[[Path], object], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told before the model is looked for, which may be a download away."""
    make(tmp_path / "key")
    words = ("convert", "tensorizer", str(tmp_path / "none"), str(tmp_path / "new"))
    assert main([*words, "--encrypt", str(tmp_path / "key")]) == 2
    error = capsys.readouterr().err
    assert f"--encrypt {tmp_path / 'key'} {found}" in error
    assert ("head -c 32 /dev/urandom >" in error) == (make is no_file)
    assert not (tmp_path / "new").exists()


def test_without_the_library_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorizer", None)
    assert convert("qwen2", tmp_path / "new") == 2
    assert "pip install 'hotstart[tensorizer]'" in capsys.readouterr().err


def test_a_limit_on_file_sizes_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    words = ["convert", "tensorizer", str(RECORDED / "qwen2"), str(tmp_path / "new")]
    command = [sys.executable, "-m", "hotstart", *words]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 4, done.stderr
    assert f"cannot be written to {tmp_path}: File too large; what was written is removed" in done.stderr
    assert list(tmp_path.iterdir()) == []
