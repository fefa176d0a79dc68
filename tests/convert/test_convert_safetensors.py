"""``hotstart convert safetensors``: the same tensors in files of another size, all of them or none."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tiny_models
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.cli.main import main
from running_server import RunningServer


def convert(*words: str | Path, kind: str = "safetensors") -> int:
    return main(["convert", kind, *map(str, words)])


def tensors_of(directory: Path) -> dict[str, bytes]:
    """Bytes, dtype and shape by name, as the library reads them."""
    found = {}
    for path in directory.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            flat = tensor.contiguous().flatten()
            raw = bytes(flat.view(dtype=_bytes()).numpy()) if flat.numel() else b""
            found[name] = repr((tensor.dtype, tuple(tensor.shape))).encode() + raw
    return found


def _bytes() -> Any:
    import torch

    return torch.uint8


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With every kind of small file."""
    directory = tiny_models.write("llama", tmp_path_factory.mktemp("convert") / "tiny", shards=2)
    (directory / "generation_config.json").write_text('{ "temperature": 0.5}\n')
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (directory / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    (directory / "LICENSE").write_text("free")
    (directory / "tokenizer.model").write_bytes(bytes(range(256)))
    return directory


def test_tensors_keep_their_bits_and_small_files_their_bytes(model: Path, tmp_path: Path) -> None:
    assert convert(model, tmp_path / "new", "--shard-size", "50kB") == 0
    before, after = snapshot(model), snapshot(tmp_path / "new")
    assert tensors_of(tmp_path / "new") == tensors_of(model)
    weights = {name for name in before if "safetensors" in name}
    assert {name: data for name, data in after.items() if name in before.keys() - weights} == {
        name: data for name, data in before.items() if name not in weights
    }


def test_files_are_numbered_and_an_index_names_them(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "new", "--shard-size", "50kB")
    files = sorted(path.name for path in (tmp_path / "new").glob("*.safetensors"))
    assert files == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    index = json.loads((tmp_path / "new/model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == open_checkpoint(str(model)).nbytes
    assert open_checkpoint(str(tmp_path / "new")).tensors.keys() == open_checkpoint(str(model)).tensors.keys()


def test_what_fits_into_one_file_has_no_index(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").glob("*.safetensors*")] == ["model.safetensors"]


def test_a_file_is_byte_for_byte_what_the_library_writes(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "new")
    path = tmp_path / "new/model.safetensors"
    save_file(load_file(path), tmp_path / "library", metadata={"format": "pt"})
    assert path.read_bytes() == (tmp_path / "library").read_bytes()


def test_digests_of_every_file_are_written(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "new", "--shard-size", "50kB")
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "new", capture_output=True)
    assert checked.returncode == 0
    listed = {line[66:] for line in (tmp_path / "new/SHA256SUMS").read_text().splitlines()}
    assert listed == snapshot(tmp_path / "new").keys() - {"SHA256SUMS"}


_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
           "float8_e4m3fn", "float8_e5m2", "complex64")  # fmt: skip


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 400),
)
@settings(max_examples=40, deadline=None)
def test_any_tensors_in_shards_of_any_size_are_the_same(
    shapes: dict[str, tuple[str, list[int]]], shard_size: int
) -> None:
    import torch

    tensors = {}
    for number, (name, (dtype, shape)) in enumerate(shapes.items()):
        kind = getattr(torch, dtype)
        size = torch.empty(shape, dtype=kind).numel()
        raw = hashlib.shake_128(str(number).encode()).digest(size * kind.itemsize)
        if dtype == "bool":
            raw = bytes(byte & 1 for byte in raw)
        flat = torch.frombuffer(bytearray(raw), dtype=kind) if raw else torch.empty(0, dtype=kind)
        tensors[name] = flat.reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        source, new = Path(folder, "source"), Path(folder, "new")
        source.mkdir()
        save_file(tensors, source / "model.safetensors")
        (source / "config.json").write_text("{}")
        assert convert(source, new, "--shard-size", str(shard_size)) == 0
        assert tensors_of(new) == tensors_of(source)
        checkpoint = open_checkpoint(str(new))  # validates the index against the headers
        assert checkpoint.tensors.keys() == tensors.keys()
        for path in new.glob("*.safetensors"):
            again = Path(folder, "again")
            save_file(load_file(path), again, metadata={"format": "pt"})
            assert path.read_bytes() == again.read_bytes()
            with safe_open(path, "pt") as file:
                sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
            assert sum(sizes) <= shard_size or len(sizes) == 1 or sum(sizes) == max(sizes)


def test_a_directory_that_holds_something_is_not_touched(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/mine").write_text("mine")
    assert convert(model, tmp_path / "new") == 2
    assert "is not empty: it holds mine" in capsys.readouterr().err
    assert snapshot(tmp_path) == {"new/mine": b"mine"}


def test_an_empty_directory_is_filled(model: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert convert(model, tmp_path / "new") == 0
    assert (tmp_path / "new/config.json").exists()


def test_a_model_is_not_converted_onto_itself(model: Path) -> None:
    before = snapshot(model)
    assert convert(model, model) == 2
    assert snapshot(model) == before


def test_a_parent_that_does_not_exist_is_not_made(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(model, tmp_path / "absent/new") == 2
    assert "mkdir -p" in capsys.readouterr().err


CHILD = [sys.executable, "-m", "hotstart", "convert", "safetensors"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 MB, of which 100 MB are one tensor; sparse, so it costs nothing."""
    directory = tmp_path_factory.mktemp("large")
    entries, end = {}, 0
    for number, size in enumerate([100_000_000, *[10_000_000] * 20]):
        entries[f"tensor.{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_the_middle_leaves_nothing(large: Path, tmp_path: Path, number: int, code: int) -> None:
    child = _stopped_in_the_middle(large, tmp_path)
    child.send_signal(number)
    child.send_signal(signal.SIGCONT)
    assert child.wait(60) == code
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_left_is_removed_by_the_next(
    large: Path, model: Path, tmp_path: Path
) -> None:
    child = _stopped_in_the_middle(large, tmp_path)
    assert not (tmp_path / "new").exists()
    child.kill()
    child.wait(60)
    assert len(list(tmp_path.iterdir())) == 1
    assert convert(model, tmp_path / "new") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def _stopped_in_the_middle(large: Path, folder: Path) -> subprocess.Popen[bytes]:
    """A conversion that has begun to write and stands still."""
    command = [*CHILD, str(large), str(folder / "new"), "--shard-size", "10MB"]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(folder.glob(".new.converting-*/model-*")):
        assert child.poll() is None
        time.sleep(0.001)  # the child tells nobody
    child.send_signal(signal.SIGSTOP)
    assert not (folder / "new").exists()
    return child


def test_memory_is_bounded_whatever_the_size_of_files_and_tensors(large: Path, tmp_path: Path) -> None:
    assert _peak("safetensors", large, tmp_path / "new", "--memory-limit", "8MB") < 100_000_000


def _peak(*words: str | Path) -> int:
    """Bytes that a conversion had in memory at most."""
    peak = "import sys; from hotstart.cli.main import main; code = main(sys.argv[1:]); "
    peak += "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]); sys.exit(code)"
    command = [sys.executable, "-c", peak, "convert", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024


def test_a_limit_on_file_sizes_is_named_and_nothing_is_left(large: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000_000, 50_000_000))

    command = [*CHILD, str(large), str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 4
    assert "new/model.safetensors cannot be written: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_known_before_anything_is_written(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=299_000_000))
    assert convert(large, tmp_path / "new") == 4
    assert "has 299 MB free; expected 301 MB" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


AS_NOBODY = """
import os, sys, hotstart.cli.limits
from hotstart.cli.main import main
main(sys.argv[1:3] + [sys.argv[3], sys.argv[4] + "/first"])  # imports everything while this user still may
os.chmod(sys.argv[4], 0o555)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(sys.argv[1:3] + [sys.argv[3], sys.argv[4] + "/second"]))
"""


def test_a_directory_that_may_not_be_written_to_is_named_with_its_owner(model: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        source = shutil.copytree(model, Path(folder, "model"))
        source.chmod(0o755)
        for path in source.rglob("*"):
            path.chmod(0o755)
        place = Path(folder, "place")
        place.mkdir()
        words = ["convert", "safetensors", str(source), str(place)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", AS_NOBODY, *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert done.returncode == 4
        assert f"{place}/second cannot be written: Permission denied (uid" in done.stderr
        assert "mode dr-xr-xr-x" in done.stderr
        assert [path.name for path in place.iterdir()] == ["first"]


def test_lines_tell_what_happens(model: Path, tmp_path: Path) -> None:
    done = subprocess.run([*CHILD, str(model), str(tmp_path / "new")], capture_output=True, text=True)
    assert [line.split("start: ")[1].split(":")[0] for line in done.stderr.splitlines()] == [
        "find model",
        "write weights",
        "publish",
    ]
    assert done.stdout.startswith(f"{tmp_path / 'new'}: ")


def test_a_converted_model_is_served_and_its_digests_hold(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "new", "--shard-size", "50kB")
    flags = ("--threads", "1", "--verify", "digest")
    with RunningServer(tmp_path / "new", *flags, log=tmp_path / "log") as server:
        server.until_ready()
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
        assert server.http.post("/v1/completions", json=body).status_code == 200
    assert "SHA256SUMS" in server.output


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_written_to_and_named(
    number: int,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def without(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    assert convert(model, tmp_path / "new") == 0
    assert f"{tmp_path} has no locks ({os.strerror(number)})" in caplog.text
    assert (tmp_path / "new/config.json").exists()


def test_an_error_on_a_file_system_without_locks_is_the_one_that_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fails)
    monkeypatch.setattr(os, "fsync", fails)
    assert convert(model, tmp_path / "new") == 4
    assert "model.safetensors cannot be written: Input/output error" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_every_file_and_directory_is_on_the_disk_before_the_name_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    fsync, rename = os.fsync, os.rename

    def syncs(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def renames(before: str, after: str) -> None:
        written = {before, *(str(path) for path in Path(before).rglob("*"))}
        assert written - synced == set()
        rename(before, after)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "rename", renames)
    assert convert(model, tmp_path / "new") == 0
    assert (tmp_path / "new/additional_chat_templates/tools.jinja").exists()


def test_a_large_file_beside_the_weights_is_not_held_in_memory(model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    with open(source / "corpus.txt", "wb") as file:
        file.truncate(200_000_000)
    assert _peak("safetensors", source, tmp_path / "new", "--memory-limit", "8MB") < 100_000_000
    assert (tmp_path / "new/corpus.txt").stat().st_size == 200_000_000
