"""What docs/troubleshooting.md says of loaders, provoked."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from hotstart.cli.main import main
from hotstart.config.settings import Config, DeviceConfig, LoadConfig, ModelConfig
from hotstart.engine.assemble import prepare
from hotstart.errors import HotstartError


class Loading:
    """A model, and a library that can be hidden or broken."""

    def __init__(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.model = model
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


def store_that_it_cannot_read(loading: Loading) -> str:
    return loading.check("--load-format", "fastsafetensors", model="s3://bucket/llama")


def gpu_that_is_not_there(loading: Loading) -> str:
    return loading.check("--load-format", "instanttensor")


def limit_below_a_tensor(loading: Loading) -> str:
    flags = ("--load-format", "runai_streamer", "--model-loader-extra-config")
    return loading.check(*flags, '{"memory_limit": 1000}')


def library_that_fails(loading: Loading) -> str:
    streamer = pytest.importorskip("runai_model_streamer").SafetensorsStreamer

    def fails(self: object) -> None:
        raise ValueError("Could not receive response from libstreamer")

    loading.monkeypatch.setattr(streamer, "get_tensors", fails)
    path = str(loading.model)
    config = Config(
        model=ModelConfig(model=path, path=path),
        load=LoadConfig(load_format="runai_streamer"),
        device=DeviceConfig(device="cpu"),
    )
    prepared = prepare(config)
    weights = prepared.placement.weights(prepared, lambda done: None)
    weights.start()
    with pytest.raises(HotstartError) as caught:
        weights.wait()
    return str(caught.value)


LOADERS: dict[str, Callable[[Loading], str]] = {
    "The loader is not installed": library_that_is_not_there,
    "The loader does not know a key": key_that_it_does_not_know,
    "The loader cannot read there": store_that_it_cannot_read,
    "The loader needs a GPU": gpu_that_is_not_there,
    "The memory limit is too small": limit_below_a_tensor,
    "The loader fails": library_that_fails,
}
"""By the title of the entry."""
