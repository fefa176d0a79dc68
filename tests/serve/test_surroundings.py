"""A start in odd surroundings: a working directory that was deleted, few files, a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hotstart
from running_server import DEADLINE, RunningServer

Model = Callable[..., Path]

HERE = {"PYTHONPATH": str(Path(hotstart.__file__).parents[1])}
"""A relative path, of whoever runs the tests, means nothing elsewhere."""


def run(*words: str, shell: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, started by a shell that does ``shell`` before."""
    done = subprocess.run(
        ["sh", "-c", f'{shell or ":"}; exec "$@"', "sh", sys.executable, "-m", "hotstart", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, **HERE},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_relative_path_in_a_deleted_directory_says_so(command: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    status, out, err = run(command, "./tiny", "--port", "0", shell=f"mkdir {gone}; cd {gone}; rmdir {gone}")
    assert status == 4
    assert "./tiny is a relative path, and the working directory no longer exists" in out + err
    assert "Traceback" not in out + err


def test_a_model_is_served_from_a_deleted_directory(tiny_model: Model, tmp_path: Path) -> None:
    model, gone, before = tiny_model(), tmp_path / "gone", os.getcwd()
    gone.mkdir()
    os.chdir(gone)
    try:
        gone.rmdir()
        with RunningServer(model, "--threads", "1", env=HERE, log=tmp_path / "log") as server:
            server.until_ready()
    finally:
        os.chdir(before)
