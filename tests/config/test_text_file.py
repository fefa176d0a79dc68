"""A file that a flag names may be anything: reading it ends, with its text or with a reason."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hotstart.config.text_file import LARGEST, read_text


def test_text_is_read_whole(tmp_path: Path) -> None:
    text = "é\n" * 100_000
    (tmp_path / "file").write_text(text)
    assert read_text(str(tmp_path / "file")) == text


def test_pipe_of_the_shell_is_read_to_its_end() -> None:
    theirs, ours = os.pipe()
    with open(theirs, "rb"), open(ours, "wb", buffering=0) as writer:

        def write() -> None:
            writer.write(b"8000\n" * 50_000)
            writer.close()

        writer.write(b"port: ")
        thread = threading.Thread(target=write)
        thread.start()
        assert read_text(f"/dev/fd/{theirs}") == "port: " + "8000\n" * 50_000
        thread.join()


def test_empty_pipe_is_an_empty_file() -> None:
    theirs, ours = os.pipe()
    os.close(ours)
    with open(theirs, "rb"):
        assert read_text(f"/dev/fd/{theirs}") == ""


def test_writer_of_a_named_pipe_may_come_later(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    thread = threading.Thread(target=path.write_text, args=["late"])
    thread.start()
    assert read_text(str(path)) == "late"
    thread.join()


@pytest.mark.parametrize("writer", [False, True], ids=["no writer", "a silent writer"])
def test_pipe_that_says_nothing_ends_in_an_error(writer: bool, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR) if writer else None
    with pytest.raises(OSError, match=r"nobody has written to it for 0\.01 s"):
        read_text(str(path), patience=0.01)
    if held is not None:
        os.close(held)


def test_device_without_an_end_is_left_alone() -> None:
    with pytest.raises(OSError, match="does not end within"):
        read_text("/dev/zero")


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match=f"it has {1 << 40} bytes, and {LARGEST} are the most"):
        read_text(str(path))


def test_byte_that_is_no_text_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"port: 1\nname: \xff\n")
    with pytest.raises(ValueError, match=r"no text in UTF-8 \(byte 0xff in line 2\)"):
        read_text(str(tmp_path / "file"))
