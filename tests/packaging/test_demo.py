"""``make demo`` and its model, where that needs no download."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def prepare(cache_root: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/demo.py"), "--prepare"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HOTSTART_CACHE_ROOT": cache_root},
    )


def test_a_cache_root_that_cannot_be_written_is_named_with_the_way_out() -> None:
    done = prepare("/proc/x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("demo: there is no place for the model (/proc/x cannot be written: ")
    assert done.stderr.endswith("set HOTSTART_CACHE_ROOT to a directory that can be written\n")


def test_prepare_prints_where_the_model_lies_and_nothing_else(tmp_path: Path) -> None:
    model = tmp_path / "demo" / "SmolLM2-135M-Instruct"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()
    done = prepare(str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{model}\n", "")
