"""Whatever a flag names to be written to is still what it was afterwards."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hotstart.config.output_file import write_output
from hotstart.errors import StorageError


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("a longer text than the new one")
    path.chmod(0o640)
    with path.open() as before:
        write_output("--json", str(path), b"new")
        assert before.read() == "a longer text than the new one", "whoever reads it sees one or the other"
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target", tmp_path / "link"
    if exists:
        target.write_text("old")
    link.symlink_to("there/target")
    write_output("--json", str(link), b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_output("--json", str(path), b"new")
        assert os.read(reader, 100) == b"new"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_pipe_without_a_reader_is_an_error_and_no_wait(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(StorageError, match=r"--json .*pipe cannot be written: nobody reads from it"):
        write_output("--json", str(path), b"new")
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_pipe_whose_reader_stands_still_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(StorageError, match="its reader has taken nothing"):
            write_output("--json", str(path), bytes(1 << 20), patience=0.01)
    finally:
        os.close(reader)


def test_a_file_whose_directory_takes_no_other_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a single file is mounted into a container."""
    path = tmp_path / "out.json"
    path.write_text("a longer text than the new one")

    def busy(source: str, target: str) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "replace", busy)
    write_output("--json", str(path), b"new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Is a directory"):
        write_output("--json", str(tmp_path), b"new")
    assert tmp_path.is_dir()


def test_a_link_planted_beside_the_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in (f"out.json.{os.getpid()}.part", "out.json.part", ".out.json.part"):
        (tmp_path / name).symlink_to(victim)
    write_output("--json", str(tmp_path / "out.json"), b"{}")
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "out.json").is_symlink()
    assert (tmp_path / "out.json").read_bytes() == b"{}"


def test_a_new_file_is_as_readable_as_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_output("--json", str(tmp_path / "out.json"), b"{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.json").stat().st_mode) == 0o640
