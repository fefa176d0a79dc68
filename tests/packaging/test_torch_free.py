"""The start path must not pay for torch: every room but the forward pass imports without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = [
    "artifacts", "bench", "checkpoint", "cli", "config", "convert", "device",
    "frontend", "messages", "parallel", "storage", "timeline", "units",
]  # fmt: skip

# A None in sys.modules makes the import statement raise, wherever it stands.
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["torch"] = sys.modules["transformers"] = None
for room in sys.argv[1:]:
    try:
        module = importlib.import_module(f"hotstart.{room}")
    except ModuleNotFoundError as error:
        if error.name != f"hotstart.{room}":
            raise
        continue
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        importlib.import_module(found.name)
        print(found.name)
"""


def import_all(*rooms: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_ALL, *rooms]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("room", TORCH_FREE)
def test_room_imports_without_torch_and_transformers(room: str) -> None:
    done = import_all(room)
    assert done.returncode == 0, done.stderr


def test_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, hotstart; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "msgspec", "asyncio", "argparse"} & set(done.stdout.split())
