"""What docs/troubleshooting.md says of loaders, provoked."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fault_proxy import FaultServer
from hotstart.cli.main import main
from hotstart.config.settings import Config, DeviceConfig, LoadConfig, ModelConfig
from hotstart.engine.assemble import prepare
from hotstart.errors import HotstartError
from hotstart.loading.streams.fast_safetensors import direct
from sharded_files import write_sharded
from tensorizer_files import write_tensorizer


class Loading:
    """A model, and a library that can be hidden or broken."""

    def __init__(
        self,
        model: Path,
        room: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """``room``: an empty directory."""
        self.model = model
        self.room = room
        self.monkeypatch = monkeypatch
        self._capsys = capsys

    def check(self, *flags: str, model: Path | str | None = None) -> str:
        """Output of a ``hotstart check`` that finds something."""
        assert main(["check", str(model or self.model), "--device", "cpu", *flags]) > 1
        captured = self._capsys.readouterr()
        return captured.out + captured.err


def library_that_is_not_there(loading: Loading) -> str:
    true = importlib.util.find_spec
    hidden = "fastsafetensors"
    loading.monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == hidden else true(name)
    )
    return loading.check("--load-format", hidden)


def key_that_it_does_not_know(loading: Loading) -> str:
    flags = ("--load-format", "runai_streamer", "--model-loader-extra-config")
    return loading.check(*flags, '{"concurency": 16}')


def keys_that_differ(loading: Loading) -> str:
    flags = ("--load-format", "tensorizer", "--model-loader-extra-config")
    return loading.check(*flags, '{"num_readers": 4, "concurrency": 8}')


def store_that_it_cannot_read(loading: Loading) -> str:
    return loading.check("--load-format", "fastsafetensors", model="s3://bucket/llama")


def gpu_that_is_not_there(loading: Loading) -> str:
    return loading.check("--load-format", "instanttensor")


def toolkit_that_is_not_there(loading: Loading) -> str:
    """Where there is a GPU, the library finds it."""
    native = pytest.importorskip("fastsafetensors").cpp
    if native.is_cuda_found():
        pytest.skip("fastsafetensors has found CUDA")

    def finds_nothing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    loading.monkeypatch.setattr(ctypes, "CDLL", finds_nothing)
    with pytest.raises(HotstartError) as caught:
        direct(native, "cuda:0")
    return str(caught.value)


def limit_below_a_tensor(loading: Loading) -> str:
    flags = ("--load-format", "runai_streamer", "--model-loader-extra-config")
    return loading.check(*flags, '{"memory_limit": 1000}')


def library_that_fails(loading: Loading) -> str:
    streamer = pytest.importorskip("runai_model_streamer").SafetensorsStreamer

    def fails(self: object) -> None:
        raise ValueError("Could not receive response from libstreamer")

    loading.monkeypatch.setattr(streamer, "get_tensors", fails)
    return load_that_fails(loading.model, "runai_streamer")


def load_that_fails(model: Path, load_format: str) -> str:
    config = Config(
        model=ModelConfig(model=str(model), path=str(model)),
        load=LoadConfig(load_format=load_format),
        device=DeviceConfig(device="cpu"),
    )
    prepared = prepare(config)
    weights = prepared.placement.weights(prepared, lambda done: None)
    weights.start()
    with pytest.raises(HotstartError) as caught:
        weights.wait()
    return str(caught.value)


def pre_sharded_directory(loading: Loading) -> str:
    return loading.check(model=write_sharded(loading.model, loading.room / "m"))


def files_of_two_ranks(loading: Loading) -> str:
    sharded = write_sharded(loading.model, loading.room / "m", tp=2)
    return loading.check("--load-format", "sharded_state", model=sharded)


def missing_part(loading: Loading) -> str:
    sharded = write_sharded(loading.model, loading.room / "m", parts=3)
    (sharded / "model-rank-0-part-1.safetensors").unlink()
    return loading.check("--load-format", "sharded_state", model=sharded)


def ordinary_checkpoint_for_tensorizer(loading: Loading) -> str:
    return loading.check("--load-format", "tensorizer")


def web_server_without_a_tensorizer_file(loading: Loading) -> str:
    with FaultServer({f"m/{file.name}": file.read_bytes() for file in loading.model.iterdir()}) as web:
        return loading.check("--load-format", "tensorizer", model=f"{web.url}/m")


def incomplete_tensorizer_file(loading: Loading) -> str:
    model = write_tensorizer(loading.model, loading.room / "m")
    file = model / "model.tensors"
    os.truncate(file, file.stat().st_size - 10)
    return loading.check("--load-format", "tensorizer", model=model)


def damaged_tensorizer_file(loading: Loading) -> str:
    model = write_tensorizer(loading.model, loading.room / "m")
    file = model / "model.tensors"
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)
    return load_that_fails(model, "tensorizer")


def encrypted_tensorizer_file(loading: Loading) -> str:
    from tensorizer import EncryptionParams

    model = write_tensorizer(loading.model, loading.room / "m", encryption=EncryptionParams.random())
    return loading.check("--load-format", "tensorizer", model=model)


LOADERS: dict[str, Callable[[Loading], str]] = {
    "The loader is not installed": library_that_is_not_there,
    "The loader does not know a key": key_that_it_does_not_know,
    "Two keys of the loader contradict each other": keys_that_differ,
    "The loader cannot read there": store_that_it_cannot_read,
    "The loader needs a GPU": gpu_that_is_not_there,
    "fastsafetensors finds no CUDA library": toolkit_that_is_not_there,
    "The memory limit is too small": limit_below_a_tensor,
    "The loader fails": library_that_fails,
    "The checkpoint is pre-sharded": pre_sharded_directory,
    "The files are for another number of ranks": files_of_two_ranks,
    "A part of a rank is missing": missing_part,
    "The checkpoint is not Tensorizer's": ordinary_checkpoint_for_tensorizer,
    "The web server has no Tensorizer file": web_server_without_a_tensorizer_file,
    "The Tensorizer file is incomplete": incomplete_tensorizer_file,
    "The Tensorizer file is damaged": damaged_tensorizer_file,
    "The Tensorizer file is encrypted": encrypted_tensorizer_file,
}
"""By the title of the entry."""
