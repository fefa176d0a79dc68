"""The start path must not pay for torch: everything but the forward pass imports without it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hotstart
from tiny_models import CONFIGS

PACKAGE = Path(hotstart.__file__).parent
ROOMS = sorted(
    path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
)
NEEDS_TORCH = {
    "attention.sdpa_paged", "attention.sdpa_slab",
    "engine.core", "engine.model_runner", "engine.sampler", "engine.sampling_numbers",
    "layers.activation", "layers.linear", "layers.norm", "layers.rope",
    "loading.image_store", "loading.random_store", "loading.streams.stream_store",
    "models.llama_forward", "models.opt_forward",
}  # fmt: skip
"""Imported when torch is there, by what runs after it."""

# A None in sys.modules makes the import statement raise, wherever it stands.
POISON = """
import importlib, pkgutil, sys
sys.modules["torch"] = sys.modules["transformers"] = None
"""
IMPORT_ROOM = """
room, needs_torch = sys.argv[1], sys.argv[2:]
module = importlib.import_module(f"hotstart.{room}")
for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
    if found.name.removeprefix("hotstart.") not in needs_torch:
        importlib.import_module(found.name)
"""
SPECS = """
import json
from hotstart.models.registry import family_for
for config in json.loads(sys.argv[1]).values():
    family = family_for(config)
    geometry = family.geometry(config)
    assert family.specs(geometry) and geometry.attention()
"""
READ_PLAN = """
from hotstart.config.settings import Config, DeviceConfig, ModelConfig
from hotstart.engine.assemble import prepare
from hotstart.loading.arena import Layout
from hotstart.loading.ring import plan_chunks
model = ModelConfig(model=sys.argv[1], path=sys.argv[1])
prepared = prepare(Config(model=model, device=DeviceConfig(device="cpu")))
weights = prepared.placement.weights(prepared, lambda done: None)
weights.start()
weights.wait()
layout = Layout.of(prepared.matched.loads, dtype=prepared.matched.dtype)
chunks = plan_chunks([(part.ref, part.offset) for part in layout.parts])
print(weights.total, sum(chunk.nbytes for chunk in chunks), prepared.checkpoint.nbytes)
"""


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", POISON + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("room", [room for room in ROOMS if not room.startswith("__")])
def test_room_imports_without_torch_and_transformers(room: str) -> None:
    run(IMPORT_ROOM, room, *NEEDS_TORCH)


def test_what_is_excepted_exists_and_does_need_torch() -> None:
    for module in NEEDS_TORCH:
        command = [sys.executable, "-c", POISON + f"importlib.import_module('hotstart.{module}')"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "import of torch halted; None in sys.modules" in done.stderr, module


def test_every_family_says_what_its_weights_are_before_torch_is_there() -> None:
    run(SPECS, json.dumps(CONFIGS))


def test_weights_are_planned_and_read_before_torch_is_there(tiny_model: Callable[..., Path]) -> None:
    total, planned, stored = map(int, run(READ_PLAN, str(tiny_model("llama", shards=2))).split())
    assert total >= stored > 0
    assert planned == stored


def test_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, hotstart; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "msgspec", "asyncio", "argparse"} & set(done.stdout.split())
