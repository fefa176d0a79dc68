from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotstart.config.cache_root import compiler_caches, hub_cache, hub_caches, resolve


def test_the_flag_comes_first(tmp_path: Path) -> None:
    environ = {"HOTSTART_CACHE_ROOT": "/b", "VLLM_CACHE_ROOT": "/c", "HOME": "/d"}
    root = resolve(str(tmp_path / "a"), environ)
    assert (root.path, root.writable) == (str(tmp_path / "a"), True)
    assert "--cache-root" in root.reason


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOTSTART_CACHE_ROOT": "a", "VLLM_CACHE_ROOT": "b", "HOME": "c"}, "a"),
        ({"VLLM_CACHE_ROOT": "b", "HOME": "c"}, "b/hotstart"),
        ({"HOME": "c"}, "c/.cache/hotstart"),
        ({"HOTSTART_CACHE_ROOT": "", "HOME": "c"}, "c/.cache/hotstart"),
    ],
)
def test_then_our_variable_then_that_of_vllm_then_home(
    tmp_path: Path, environ: dict[str, str], expected: str
) -> None:
    environ = {name: f"{tmp_path}/{value}" if value else "" for name, value in environ.items()}
    assert resolve(None, environ).path == f"{tmp_path}/{expected}"


def test_a_relative_root_becomes_absolute_and_a_tilde_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("here", {}).path == str(tmp_path / "here")
    assert resolve("~/there", {"HOME": str(tmp_path)}).path == str(tmp_path / "there")


def test_a_root_below_a_file_costs_one_line_and_not_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    root = resolve(str(tmp_path / "file" / "cache"), {})
    assert not root.writable
    assert "Not a directory" in root.reason
    assert "without caches" in root.reason
    assert hub_caches(root, {}) == {}


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user")
def test_a_user_without_a_home_goes_on_without_caches() -> None:
    script = (
        "import os\n"
        "from hotstart.config.cache_root import resolve\n"
        "os.setuid(54321)\n"
        "root = resolve(None, {})\n"
        "assert (root.path, root.writable) == ('', False), root.path\n"
        "print(root.reason)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "no home directory for user 54321" in done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user")
def test_an_unwritable_home_goes_on_without_caches(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "from hotstart.config.cache_root import resolve\n"
        "os.setuid(54321)\n"
        "root = resolve(None, {'HOME': '/proc'})\n"
        "assert not root.writable\n"
        "print(root.reason)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "/proc/.cache/hotstart" in done.stdout


def test_a_full_root_goes_on_without_caches(tmp_path: Path) -> None:
    script = (
        "import resource, signal, sys\n"
        "from hotstart.config.cache_root import resolve\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # as a disk with 100 bytes left\n"
        "root = resolve(sys.argv[1], {})\n"
        "assert not root.writable\n"
        "print(root.reason)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
    )
    assert "no space left" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_one_setting_moves_every_cache(tmp_path: Path) -> None:
    root = resolve(str(tmp_path), {})
    assert compiler_caches(root.path, {}) | hub_caches(root, {}) == {
        "TRITON_CACHE_DIR": f"{tmp_path}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/inductor",
        "HF_HUB_CACHE": f"{tmp_path}/hub",
        "HF_XET_CACHE": f"{tmp_path}/xet",
    }


def test_a_cache_that_the_user_placed_stays_there(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": "/mine", "HF_HOME": "/mine"}
    root = resolve(str(tmp_path), environ)
    assert set(compiler_caches(root.path, environ)) == {"TORCHINDUCTOR_CACHE_DIR"}
    assert hub_cache(root, environ) is None
    assert "HF_XET_CACHE" not in environ


def test_the_default_root_leaves_the_hub_where_other_tools_share_it(tmp_path: Path) -> None:
    root = resolve(None, {"HOME": str(tmp_path)})
    assert hub_caches(root, {}) == {}


def child(script: str, root: Path, *unset: str) -> list[str]:
    """What a script prints, one word each, that gets the root as its argument."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    command = [sys.executable, "-c", script, str(root)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.split()


def test_the_hub_library_finds_its_transfer_cache_below_the_root(tmp_path: Path) -> None:
    script = """
import os, sys
from hotstart.config.cache_root import hub_cache, resolve
print(hub_cache(resolve(sys.argv[1], os.environ), os.environ))
from huggingface_hub import constants
print(constants.HF_XET_CACHE)
"""
    assert child(script, tmp_path, "HF_", "HUGGINGFACE_") == [f"{tmp_path}/hub", f"{tmp_path}/xet"]


def test_what_the_engine_compiles_goes_below_the_root(tmp_path: Path) -> None:
    # The model does not exist: the engine's start goes no further than its settings.
    script = """
import os, socket, sys
from types import SimpleNamespace
from hotstart.config.settings import Config, ModelConfig, encode
from hotstart.engine.process import run
from hotstart.messages import Go, frame, framed
ours, theirs = socket.socketpair()
config = Config(model=ModelConfig(model="/gone", path="/gone"), cache_root=sys.argv[1])
ours.sendall(framed(encode(config)) + frame(Go()))
assert run(theirs, SimpleNamespace(began=0.0)) == 3
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(os.environ["TRITON_CACHE_DIR"], cache_dir())
"""
    found = child(script, tmp_path, "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    assert found == [f"{tmp_path}/triton", f"{tmp_path}/inductor"]


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    resolve(str(tmp_path), {})
    assert list(tmp_path.iterdir()) == []
