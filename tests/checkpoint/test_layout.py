"""Which files are the model, and what is said when they are not whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from checkpoint_files import (
    STUB,
    read_index,
    shard_name,
    weights,
    write_index,
    write_model,
    write_shard,
)
from hotstart.checkpoint.layout import describe, open_checkpoint
from hotstart.checkpoint.safetensors import read_header
from hotstart.errors import ModelError, ProblemsFound

FIRST, SECOND = shard_name(1, 2), shard_name(2, 2)


def names(path: Path, **options: bool) -> list[str]:
    return [os.path.basename(file.path) for file in open_checkpoint(str(path), **options).files]


def test_index_chooses_the_files(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_model(tmp_path)))
    assert [os.path.basename(file.path) for file in checkpoint.files] == [FIRST, SECOND]
    assert checkpoint.index == str(tmp_path / "model.safetensors.index.json")
    assert set(checkpoint.tensors) == set(weights())


def test_tensors_are_found_at_their_offsets(tmp_path: Path) -> None:
    contents = {"a": b"abcd", "b": b"efghijkl"}
    write_shard(tmp_path / "model.safetensors", {"a": ("BF16", (2,)), "b": ("F32", (2, 1))}, contents)
    checkpoint = open_checkpoint(str(tmp_path))
    data = (tmp_path / "model.safetensors").read_bytes()
    for name, ref in checkpoint.tensors.items():
        assert data[ref.offset : ref.offset + ref.nbytes] == contents[name]
    assert (checkpoint.tensors["b"].dtype, checkpoint.tensors["b"].shape) == ("F32", (2, 1))
    assert checkpoint.nbytes == 12


def test_without_an_index_one_file_is_the_model(tmp_path: Path) -> None:
    write_model(tmp_path, shards=1)
    write_shard(tmp_path / "extra.safetensors", {"x": ("F32", (1,))})
    assert names(tmp_path) == ["model.safetensors"]


def test_without_an_index_all_shards_are_the_model(tmp_path: Path) -> None:
    assert names(write_model(tmp_path, shards=6, index=False)) == [shard_name(n, 6) for n in range(1, 7)]


def test_copies_are_left_alone_and_their_bytes_counted(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_shard(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": ("BF16", (64, 16))})
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(3000))
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "consolidated.00.pth").write_bytes(bytes(5000))
    write_shard(tmp_path / "old.safetensors", {"x": ("F32", (1,))})
    checkpoint = open_checkpoint(str(tmp_path))
    reasons = {skipped.path: skipped.reason for skipped in checkpoint.skipped}
    assert reasons == {
        "consolidated.safetensors": "a consolidated copy of the same weights",
        "pytorch_model.bin": "pickled weights are never loaded",
        "original/consolidated.00.pth": "a copy in the publisher's layout",
        "old.safetensors": "not named by model.safetensors.index.json",
    }
    saved = sum(skipped.size for skipped in checkpoint.skipped)
    assert saved == sum((tmp_path / name).stat().st_size for name in reasons)
    assert describe(checkpoint)[-1].startswith("not read in all: 10")


@pytest.mark.parametrize("length", ["minus one", "in the header", 7, 0])
def test_cut_shard_is_reported_with_both_sizes(length: int | str, tmp_path: Path) -> None:
    shard = write_model(tmp_path) / SECOND
    whole = shard.stat().st_size
    cut = {"minus one": whole - 1, "in the header": 100}.get(str(length), length)
    assert isinstance(cut, int)
    os.truncate(shard, cut)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(tmp_path))
    text = str(caught.value)
    assert str(shard) in text
    assert f"{cut} bytes" in text
    assert "interrupted" in text
    if length == "minus one":
        assert f"{whole} bytes" in text


def test_all_bad_shards_are_reported_together(tmp_path: Path) -> None:
    write_model(tmp_path, shards=6)
    os.truncate(tmp_path / shard_name(2, 6), 7)
    (tmp_path / shard_name(3, 6)).write_bytes(STUB)
    (tmp_path / shard_name(5, 6)).unlink()
    with pytest.raises(ProblemsFound) as caught:
        open_checkpoint(str(tmp_path))
    texts = [str(problem) for problem in caught.value.problems]
    assert [next(n for n in (2, 3, 5) if shard_name(n, 6) in text) for text in texts] == [5, 2, 3]
    assert caught.value.exit_code == 3


def test_pointer_stub_announces_the_true_size(tmp_path: Path) -> None:
    (write_model(tmp_path) / FIRST).write_bytes(STUB)
    with pytest.raises(ModelError, match=r"4976698672 bytes \(4\.98 GB\)") as caught:
        open_checkpoint(str(tmp_path))
    assert "git lfs pull" in str(caught.value)
    assert "bucket" in str(caught.value)


def test_absent_shard_of_an_incomplete_copy(tmp_path: Path) -> None:
    (write_model(tmp_path) / SECOND).unlink()
    held = len(read_header(str(tmp_path / FIRST)).tensors)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(tmp_path))
    assert f"names 1 absent file ({SECOND}); files on disk hold {held} of {len(weights())}" in str(
        caught.value
    )
    assert "--ignore-index" not in str(caught.value)


def test_absent_shard_without_an_index_is_known_by_the_numbers(tmp_path: Path) -> None:
    (write_model(tmp_path, shards=3, index=False) / shard_name(2, 3)).unlink()
    with pytest.raises(ModelError, match=f"1 weight file absent from .*{shard_name(2, 3)}"):
        open_checkpoint(str(tmp_path))


def resharded(path: Path) -> Path:
    """Three new complete files under the index of two old ones."""
    write_model(path, shards=2)
    index = read_index(path)
    for name in (FIRST, SECOND):
        (path / name).unlink()
    write_model(path, shards=3, index=False)
    write_index(path, index)
    return path


def test_index_older_than_complete_files_offers_to_ignore_it(tmp_path: Path) -> None:
    total = len(weights())
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(resharded(tmp_path)))
    assert f"names 2 absent files ({FIRST}, {SECOND}); files on disk hold {total} of {total} expected" in str(
        caught.value
    )
    assert "--ignore-index" in str(caught.value)


def test_ignored_index_goes_by_the_files(tmp_path: Path) -> None:
    assert names(resharded(tmp_path), ignore_index=True) == [shard_name(n, 3) for n in (1, 2, 3)]


def test_ignored_index_does_not_hide_a_tensor_in_no_file(tmp_path: Path) -> None:
    resharded(tmp_path)
    tensors = {
        ref.name: (ref.dtype, ref.shape) for ref in read_header(str(tmp_path / shard_name(3, 3))).tensors
    }
    tensors.pop("lm_head.weight")
    write_shard(tmp_path / shard_name(3, 3), tensors)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(tmp_path))
    assert f"{len(weights()) - 1} of {len(weights())}" in str(caught.value)
    assert "--ignore-index" not in str(caught.value)
    assert "lm_head.weight" not in open_checkpoint(str(tmp_path), ignore_index=True).tensors


def test_index_that_puts_a_tensor_in_another_file(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_index(tmp_path, {**read_index(tmp_path), "lm_head.weight": FIRST})
    with pytest.raises(
        ModelError, match=rf"'lm_head\.weight' is in {SECOND}; expected to find it in {FIRST}"
    ):
        open_checkpoint(str(tmp_path))


def test_index_that_names_a_tensor_in_no_file(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_index(tmp_path, {**read_index(tmp_path), "model.layers.9.mlp.up_proj.weight": SECOND})
    with pytest.raises(ModelError, match=r"1 tensor that no file holds: model\.layers\.9"):
        open_checkpoint(str(tmp_path))


def test_tensor_in_two_files(tmp_path: Path) -> None:
    write_model(tmp_path, shards=3, index=False)
    shutil.copy(tmp_path / shard_name(1, 3), tmp_path / "model-extra.safetensors")
    with pytest.raises(ModelError, match="stored in more than one file") as caught:
        open_checkpoint(str(tmp_path))
    assert shard_name(1, 3) in str(caught.value)
    assert "model-extra.safetensors" in str(caught.value)


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is empty.*mount it"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"pickled weights only \(pytorch_model\.bin\).*save_pretrained"),
        ("model.pth", "pickled weights only"),
        ("model-Q4_K_M.gguf", "is a GGUF file"),
        ("consolidated.safetensors", "publisher's own layout only"),
        ("adapter_model.safetensors", "holds an adapter and no model"),
        ("model.tensors", "Tensorizer file"),
        ("README.md", "holds no weight files"),
    ],
)
def test_directory_without_usable_weights_says_what_it_holds(file: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"something")
    with pytest.raises(ModelError, match=message):
        open_checkpoint(str(tmp_path))


def test_shard_given_as_the_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"is a weight file; .*Pass {tmp_path}"):
        open_checkpoint(str(write_model(tmp_path) / FIRST))


def test_directory_in_place_of_a_shard(tmp_path: Path) -> None:
    (write_model(tmp_path) / FIRST).unlink()
    (tmp_path / FIRST).mkdir()
    with pytest.raises(ModelError, match=f"{FIRST} is a directory; expected a safetensors file"):
        open_checkpoint(str(tmp_path))


def test_dangling_link_names_its_target(tmp_path: Path) -> None:
    (write_model(tmp_path) / FIRST).unlink()
    (tmp_path / FIRST).symlink_to("/blobs/gone")
    with pytest.raises(ModelError, match=r"symbolic link to /blobs/gone, which is absent"):
        open_checkpoint(str(tmp_path))


def test_links_out_of_the_directory_are_followed(tmp_path: Path) -> None:
    write_model(tmp_path / "snapshot")
    (tmp_path / "blobs").mkdir()
    for name in (FIRST, SECOND):
        (tmp_path / "snapshot" / name).rename(tmp_path / "blobs" / name)
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
    assert names(tmp_path / "snapshot") == [FIRST, SECOND]
