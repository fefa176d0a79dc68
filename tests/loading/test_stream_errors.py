"""A library that fails, or gives other tensors than the files hold, ends the load: nobody replaces it."""

from __future__ import annotations

import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotstart.errors import ConfigError, ModelError, StorageError
from loaded_weights import start_with

runai = pytest.importorskip("runai_model_streamer")
fastsafetensors = pytest.importorskip("fastsafetensors")

NAME = "model.norm.weight"
Tensors = Iterator[tuple[str, Tensor]]


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


def load(path: Path, load_format: str = "runai_streamer", **extra: Any) -> None:
    start = start_with(path, load_format, **extra)
    weights = start.placement.weights(start, lambda done: None)
    weights.start()
    weights.wait()


@pytest.fixture
def gives(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tensors], Tensors]], None]:
    """``gives(change)``: the library's tensors, changed on their way."""

    def patch(change: Callable[[Tensors], Tensors]) -> None:
        true = runai.SafetensorsStreamer.get_tensors
        monkeypatch.setattr(runai.SafetensorsStreamer, "get_tensors", lambda self: change(true(self)))

    return patch


def test_an_error_of_runai_ends_the_load_and_names_the_library(
    model: Path, gives: Callable[..., None]
) -> None:
    def breaks(tensors: Tensors) -> Tensors:
        yield next(tensors)
        raise ValueError("Could not receive response")

    gives(breaks)
    with pytest.raises(StorageError, match=r"^runai-model-streamer 0\.17\.\d+ failed: ValueError: Could not"):
        load(model)


def test_an_error_of_fastsafetensors_ends_the_load_and_names_the_library(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*arguments: object, **settings: object) -> None:
        raise RuntimeError("submit_read failed")

    monkeypatch.setattr(fastsafetensors.SafeTensorsFileLoader, "copy_files_to_device", breaks)
    with pytest.raises(StorageError, match=r"^fastsafetensors 0\.5\.\d+ failed: .*submit_read failed"):
        load(model, "fastsafetensors")


def test_a_library_that_cannot_be_imported_is_an_error_with_the_command(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = start_with(model, "runai_streamer")
    monkeypatch.setitem(sys.modules, "runai_model_streamer", None)
    weights = start.placement.weights(start, lambda done: None)
    weights.start()
    with pytest.raises(
        ConfigError, match=r"cannot be imported.* Install it: pip install 'hotstart\[runai\]'"
    ):
        weights.wait()


def test_tensors_that_do_not_come_are_named(model: Path, gives: Callable[..., None]) -> None:
    gives(lambda tensors: (pair for pair in tensors if pair[0] != NAME))
    with pytest.raises(ModelError, match=rf"ended without 1 tensor: .*{NAME}"):
        load(model)


def test_a_tensor_that_comes_twice_is_named(model: Path, gives: Callable[..., None]) -> None:
    gives(lambda tensors: (pair for pair in tensors for _ in range(1 + (pair[0] == NAME))))
    with pytest.raises(ModelError, match=f"gave the tensor '{NAME}' twice"):
        load(model)


def test_a_tensor_of_another_shape_is_named(model: Path, gives: Callable[..., None]) -> None:
    gives(lambda tensors: ((name, t[:-1] if name == NAME else t) for name, t in tensors))
    with pytest.raises(ModelError, match=rf"gave {NAME} as float32 \[63\]; expected float32 \[64\]"):
        load(model)


def test_a_tensor_of_another_dtype_is_named(model: Path, gives: Callable[..., None]) -> None:
    gives(lambda tensors: ((name, t.half() if name == NAME else t) for name, t in tensors))
    with pytest.raises(ModelError, match=rf"gave {NAME} as float16 \[64\]; expected float32"):
        load(model)


def test_a_tensor_that_no_file_has_is_named(model: Path, gives: Callable[..., None]) -> None:
    gives(lambda tensors: (("stray" if name == NAME else name, t) for name, t in tensors))
    with pytest.raises(ModelError, match="gave a tensor 'stray', which no weight file has"):
        load(model)


def test_each_tensor_is_forgotten_before_the_next_one_is_asked_for(
    model: Path, gives: Callable[..., None]
) -> None:
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(tensors: Tensors) -> Tensors:
        for name, tensor in tensors:
            copy = tensor.clone()
            held.append(weakref.ref(copy))
            del tensor
            yield name, copy
            del copy
            alive.append(sum(ref() is not None for ref in held))

    gives(watched)
    load(model)
    assert len(alive) > 10
    assert set(alive) == {0}


def test_a_limit_below_the_largest_tensor_is_refused_before_the_load_begins(model: Path) -> None:
    start = start_with(model, "runai_streamer", memory_limit=1000)
    with pytest.raises(ConfigError, match=r"memory_limit is 1000, and the largest tensor has 131072 bytes"):
        start.placement.weights(start, lambda done: None)


def test_the_limit_reaches_the_library(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "runai_model_streamer")
    load(model, memory_limit=150_000)
    assert "CPU ring 1 x 128.0 KiB = 128.0 KiB for 497.2 KiB" in caplog.text  # its own words


def test_a_damaged_file_has_the_same_error_as_with_our_own_reader(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = shutil.copytree(tiny_model("llama"), tmp_path / "cut")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    errors = []
    for load_format in ("auto", "runai_streamer", "fastsafetensors"):
        with pytest.raises(ModelError) as caught:
            start_with(path, load_format)
        errors.append(str(caught.value))
    assert len(set(errors)) == 1
    assert "too few" in errors[0]


def test_weights_of_a_cpu_give_their_memory_back_when_they_are_packed(model: Path) -> None:
    start = start_with(model, "runai_streamer")
    weights = start.placement.weights(start, lambda done: None)
    weights.start()
    store = weights.store()
    weights.wait()
    assert isinstance(store.tensor("layers.0.qkv"), torch.Tensor)
    assert weights.may_copy("layers.0.qkv")
    weights.release("layers.0.qkv")
    with pytest.raises(KeyError):
        store.tensor("layers.0.qkv")
