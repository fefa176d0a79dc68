"""A start in odd surroundings: a working directory that was deleted, few files, a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hotstart
from running_server import DEADLINE, RunningServer, engines_of

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


@pytest.mark.parametrize("limit", [6, 8, 12, 15, 16, 31])
def test_too_few_files_are_one_error_with_both_numbers(limit: int, tiny_model: Model) -> None:
    status, out, err = run("serve", str(tiny_model()), "--port", "0", shell=f"ulimit -n {limit}")
    assert (status, out) == (2, "")
    assert err.startswith(f"hotstart: configuration error: this process may open {limit} files (ulimit -n)")
    assert "expected at least 32" in err
    assert len(err.splitlines()) == 2


def test_check_reports_too_few_files(tiny_model: Model) -> None:
    status, out, _ = run("check", str(tiny_model()), "--port", "0", shell="ulimit -n 16")
    assert status == 2
    assert "fail  files " in out


def test_check_warns_of_a_limited_address_space(tiny_model: Model) -> None:
    status, out, _ = run("check", str(tiny_model()), "--port", "0", shell="ulimit -v 40000000")
    assert status == 0
    assert "warn  memory  " in out
    assert "limited to 41.0 GB (ulimit -v)" in " ".join(out.split())


def test_memory_that_a_limit_of_the_address_space_denies_is_explained_by_it(tiny_model: Model) -> None:
    status, _, err = run("serve", str(tiny_model()), "--port", "0", shell="ulimit -v 300000")
    assert status == 6
    assert "limited to 307 MB (ulimit -v)" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["serve", "--help"], ["check"]])
def test_output_that_cannot_be_written_is_one_error(
    words: list[str], tiny_model: Model, tmp_path: Path
) -> None:
    """A limit on the size of files stands for the full disk."""
    if words == ["check"]:
        words = ["check", str(tiny_model()), "--port", "0"]
    status, _, err = run(*words, shell=f"ulimit -f 0; exec >{tmp_path}/out")
    assert status == 4
    assert "hotstart: storage error: standard output cannot be written: File too large" in err
    assert "Traceback" not in err
    assert "Exception ignored" not in err


ENDED_WHILE_SPAWNING = """
import os, signal, sys
from hotstart.cli import main, serve
class Spawned(serve.EngineProcess):
    def __init__(self, **options):
        super().__init__(**options)
        os.kill(os.getpid(), signal.SIGTERM)
serve.EngineProcess = Spawned
sys.exit(main.main(["serve", sys.argv[1], "--port", "0"]))
"""


def test_sigterm_while_the_engine_is_spawned_ends_both(tiny_model: Model) -> None:
    command = [sys.executable, "-c", ENDED_WHILE_SPAWNING, str(tiny_model())]
    with subprocess.Popen(command, env={**os.environ, **HERE}) as process:
        assert process.wait(DEADLINE) == 143
        assert not engines_of(process.pid)
