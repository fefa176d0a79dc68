"""``--load-format``: who can read what from where, and what is refused before anything is read."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotstart.config.load_formats import ACCEPTED, FORMATS, PLACES, REFUSALS, is_stream
from hotstart.config.parse import parse_serve
from hotstart.config.settings import Config, DeviceConfig, LoadConfig, ModelConfig
from hotstart.errors import ConfigError, HotstartError
from hotstart.loading.loader_check import check_loader

ROOT = Path(__file__).parents[2]
MODELS = {
    "dir": "/models/llama",
    "s3": "s3://bucket/llama",
    "gs": "gs://bucket/llama",
    "az": "az://container/llama",
    "http": "http://host/llama",
    "https": "https://host/llama",
    "hub": "Qwen/Qwen3-0.6B",
}
"""One model for each place; none of them exists, for nobody looks."""
STREAMS = [name for name in FORMATS if is_stream(name)]
VLLM = (
    "auto", "hf", "safetensors", "pt", "mistral", "npcache", "dummy", "fastsafetensors", "instanttensor",
    "runai_streamer", "runai_streamer_sharded", "sharded_state", "tensorizer", "ipc_cache", "modelexpress",
    "gguf", "bitsandbytes",
)  # fmt: skip


def config(load_format: str, model: str = "/models/llama", *, device: str = "cpu", **load: Any) -> Config:
    return Config(
        model=ModelConfig(model=model),
        load=LoadConfig(load_format=load_format, **load),
        device=DeviceConfig(device=device),
    )


def refusal(given: Config) -> str:
    with pytest.raises(HotstartError) as caught:
        check_loader(given)
    assert caught.value.exit_code == 2
    return str(caught.value)


LIBRARIES = {row.library for row in FORMATS.values()} | {
    module for row in FORMATS.values() for module, _ in row.parts.values()
}
Install = Callable[[Callable[[str], bool]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(chosen)``: as if of all libraries just these were there."""
    true = importlib.util.find_spec

    def only(chosen: Callable[[str], bool]) -> None:
        def find(name: str) -> object:
            return (true("json") if chosen(name) else None) if name in LIBRARIES else true(name)

        monkeypatch.setattr(importlib.util, "find_spec", find)

    return only


@pytest.fixture
def installed(install: Install) -> None:
    """As if every library were there."""
    install(lambda name: True)


@pytest.mark.parametrize("name", VLLM)
def test_every_format_of_vllm_is_taken_or_refused_with_reason_and_way_out(name: str) -> None:
    if name in ACCEPTED:
        assert parse_serve(["/m", "--load-format", name], {}).config.load.load_format == name
        return
    because, instead = REFUSALS[name]
    assert instead
    with pytest.raises(ConfigError, match=re.escape(f"--load-format {name} is refused: {because}")):
        parse_serve(["/m", "--load-format", name], {})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ACCEPTED)
def test_each_place_is_read_or_refused_with_what_can_read_it(name: str, place: str, installed: None) -> None:
    row = FORMATS[name]
    given = config(name, MODELS[place], device="cpu")
    if place in row.places:
        because, instead = row.places[place]
        assert because in refusal(given)
        assert instead[1:] in refusal(given)  # its first letter is a capital there
    elif not row.device:
        assert bool(check_loader(given)) == is_stream(name)


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_unknown_key_is_refused_with_the_list_of_the_right_ones(name: str, installed: None) -> None:
    given = config(name, model_loader_extra_config={"concurency": 4})
    found = refusal(given)
    assert "--model-loader-extra-config has no key 'concurency'" in found
    for key in FORMATS[name].keys:
        assert key in found


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("runai_streamer", "concurrency", 0),
        ("runai_streamer", "concurrency", "16"),
        ("runai_streamer", "concurrency", True),
        ("runai_streamer", "memory_limit", -2),
        ("runai_streamer", "memory_limit", 0.5),
        ("runai_streamer", "distributed", 1),
        ("runai_streamer_sharded", "pattern", ""),
        ("fastsafetensors", "memory_limit", "4GiB"),
        ("dummy", "concurrency", 4),
        ("fastsafetensors", "concurrency", 20_000),
        ("runai_streamer", "memory_limit", 1 << 64),
        ("sharded_state", "pattern", ["m-{rank}.safetensors"]),
        ("sharded_state", "pattern", "m-{rank}\ud800.safetensors"),
    ],
)
def test_a_wrong_value_is_refused_with_the_right_ones(
    name: str, key: str, value: object, installed: None
) -> None:
    assert key in refusal(config(name, model_loader_extra_config={key: value}))


@pytest.mark.parametrize("name", [name for name in ACCEPTED if name != "dummy"])
@pytest.mark.parametrize(
    "extra", [{"concurrency": 16, "memory_limit": 5368709120}, {"concurrency": 1024}], ids=str
)
def test_concurrency_and_limit_are_taken_by_every_loader(
    name: str, extra: dict[str, int], installed: None
) -> None:
    device = "cuda" if FORMATS[name].device else "cpu"
    check_loader(config(name, model_loader_extra_config=extra, device=device))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("auto", {"num_threads": 4, "enable_multithread_load": True}),
        ("runai_streamer", {"distributed": True}),
        ("runai_streamer_sharded", {"distributed": False, "pattern": "m-{rank}-{part}.safetensors"}),
        ("sharded_state", {"pattern": "m-{rank:02d}-{part}.safetensors"}),
        ("tensorizer", {"tensorizer_uri": "/models/llama/m-%03d.tensors", "vllm_tensorized": True}),
        ("tensorizer", {"tensorizer_config": {"num_readers": 4, "stream_kwargs": {"buffer_size": 4096}}}),
        ("tensorizer", {"tensorizer_dir": "/models/llama", "deserialization_kwargs": {"verify_hash": False}}),
    ],
)
def test_keys_of_vllm_are_taken(name: str, extra: dict[str, Any], installed: None) -> None:
    check_loader(config(name, model_loader_extra_config=extra))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("flag", [{"read_strategy": "direct"}, {"disk_cache": "/tmp/copies"}])
def test_flags_of_our_own_readers_are_refused_beside_a_library(
    name: str, flag: dict[str, str], installed: None
) -> None:
    (given,) = flag.values()
    assert f"{given} with --load-format {name}: that library reads by itself" in refusal(config(name, **flag))


def test_a_gpu_loader_on_a_cpu_is_refused_with_one_that_works(installed: None) -> None:
    found = refusal(config("instanttensor"))
    assert "loads into an NVIDIA GPU only, and the device is the CPU" in found
    assert "--load-format fastsafetensors" in found


@pytest.mark.parametrize("name", STREAMS)
def test_a_library_that_is_not_installed_is_an_error_with_the_exact_command(
    name: str, install: Install
) -> None:
    install(lambda module: False)
    row = FORMATS[name]
    found = refusal(config(name))
    assert f"needs {row.distribution}, which is not installed" in found
    assert found.endswith(f"Install it: pip install 'hotstart[{row.extra}]'.")


def test_a_part_for_one_store_that_is_not_installed_is_named(install: Install) -> None:
    install(lambda module: not module.endswith("_gcs"))
    found = refusal(config("runai_streamer", MODELS["gs"]))
    assert "of a model at gs:// needs runai-model-streamer-gcs, which is not installed" in found
    assert "pip install 'hotstart[runai]'" in found
    assert check_loader(config("runai_streamer", MODELS["s3"]))


def test_all_that_is_wrong_is_said_at_once(installed: None) -> None:
    given = config("fastsafetensors", MODELS["s3"], model_loader_extra_config={"a": 1}, read_strategy="map")
    found = refusal(given)
    for part in ("no key 'a'", "cannot read s3://", "--read-strategy map with"):
        assert part in found


def test_every_extra_is_in_the_project_file() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[project")[0]
    for row in FORMATS.values():
        assert not row.extra or re.search(rf"^{row.extra} = \[[^]]*\"{row.distribution}[\[>]", extras, re.M)


def test_a_start_with_our_own_readers_imports_no_adapter_and_no_library(tmp_path: Path) -> None:
    """Up to the point where bytes flow; the libraries are installed where this runs."""
    import tiny_models

    model = tiny_models.write("llama", tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", _START, str(model)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    libraries = {row.library for row in FORMATS.values() if row.library} | {"boto3", "importlib.metadata"}
    loaded = done.stdout.split()
    assert "hotstart.config.load_formats" in loaded
    assert [name for name in loaded if name in libraries or "loading.streams" in name] == []


_START = """
import sys
from hotstart.config.settings import Config, DeviceConfig, ModelConfig
from hotstart.engine.assemble import prepare
model = ModelConfig(model=sys.argv[1], path=sys.argv[1])
prepared = prepare(Config(model=model, device=DeviceConfig(device="cpu")))
prepared.placement.footprint(prepared)
weights = prepared.placement.weights(prepared, lambda done: None)
weights.start()
weights.wait()
print(*sys.modules)
"""
