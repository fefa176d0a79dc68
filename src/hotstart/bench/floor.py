"""Measure the floor of a start, and the two things it is made of, each in a fresh process.

The floor is what a start of any torch-based server cannot go below: python start + ``import torch``
+ what is left of fetching the bytes after that + one eager forward step. A plain import is counted,
so a server that imports torch lean can be faster than its floor.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hotstart.errors import EngineError

_PROGRAM = str(Path(__file__).with_name("floor_process.py"))
PROMPT_TOKENS = 24
"""Tokens of the forward step; about as many as :func:`hotstart.bench.client.fresh_prompt` makes."""


@dataclass(frozen=True)
class Floor:
    """One run; seconds from just before the process was made."""

    imported: float
    """Python is up and torch imported."""
    arrived: float
    """Every byte is in memory as well."""
    total: float
    """One forward step is done as well."""
    fetch_seconds: float
    """From the first byte asked for to the last one there, imports or not."""
    bytes: int

    @property
    def forward(self) -> float:
        """Seconds of the forward step."""
        return self.total - self.arrived


def import_torch() -> float:
    """Wall time of ``python -c "import torch"``, its exit included, in seconds."""
    begin = time.monotonic()
    _run([sys.executable, "-c", "import torch"])
    return time.monotonic() - begin


def measure_floor(directory: str, how: str, device: str = "") -> Floor:
    """Run the floor once.

    ``how`` the weights come: ``map`` (the page cache holds the files), ``buffered``, ``direct``; or
    ``arena``: into the memory of ``device``, whose context then counts too.
    """
    spawned = time.monotonic()
    command = [sys.executable, _PROGRAM, "floor", directory, how, str(PROMPT_TOKENS)]
    result = _json([*command, device] if device else command)
    return Floor(
        imported=result["imported"] - spawned,
        arrived=result["arrived"] - spawned,
        total=result["end"] - spawned,
        fetch_seconds=result["fetch_seconds"],
        bytes=int(result["bytes"]),
    )


def measure_read(directory: str, how: str) -> float:
    """Seconds of a plain parallel read of all weights by a process that does nothing else."""
    return _json([sys.executable, _PROGRAM, "read", directory, how])["fetch_seconds"]


def _json(command: list[str]) -> dict[str, float]:
    result: dict[str, float] = json.loads(_run(command))
    return result


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise EngineError(
            f"the floor could not be measured: {last[0]}", advice="install torch, check the model"
        )
    return done.stdout
