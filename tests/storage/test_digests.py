"""Digests as publishers write them, and those that starts record."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hotstart.errors import ModelError
from hotstart.storage.digests import DISPUTED, Expected, Records, local_identity, parse_sums, published

A, B = hashlib.sha256(b"a").hexdigest(), hashlib.sha256(b"b").hexdigest()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"{A}  model.safetensors", "model.safetensors"),
        (f"{A} *model.safetensors", "model.safetensors"),
        (f"{A.upper()}  ./model.safetensors\r", "model.safetensors"),
        (f"SHA256 (model.safetensors) = {A}", "model.safetensors"),
        (f"{A}  two words.safetensors", "two words.safetensors"),
        (f"\\{A}  back\\\\slash", "back\\slash"),
        (f"\\SHA256 (line\\nfeed) = {A}", "line\nfeed"),
        (A, ""),
        (f"{A}  ", ""),
        (f"{A}  ././/model.safetensors", "model.safetensors"),
        (f"{A.upper()} *./model.safetensors\r", "model.safetensors"),
        (f"{A} model.safetensors", "model.safetensors"),
        (f"{A}\tmodel.safetensors", "model.safetensors"),
        (f"{A}   begins with a space", " begins with a space"),
        (f"SHA256(model.safetensors)= {A}", "model.safetensors"),
        (f"SHA2-256(./model.safetensors)= {A.upper()}\r", "model.safetensors"),
        (f"SHA256 (two (2) words) = {A}", "two (2) words"),
        (f"{A}  original/model.safetensors", "original/model.safetensors"),
    ],
)
def test_every_form_of_a_digest(line: str, name: str) -> None:
    assert parse_sums(f"# a comment\n{line}\n") == {name: A}


def test_a_name_with_any_number_of_components_that_mean_nothing_is_read_in_one_pass() -> None:
    assert parse_sums(f"{A}  {'./' * 4_000_000}a\n") == {"a": A}


def test_a_mark_of_the_byte_order_is_no_part_of_a_digest() -> None:
    assert parse_sums(f"\ufeff{A}  a\r\n{B}  b\r\n") == {"a": A, "b": B}


def test_the_same_digest_twice_is_one_and_two_that_differ_are_none() -> None:
    text = f"{A}  a\n{A.upper()} *./a\n{A}  b\n{B}  b\n"
    assert parse_sums(text) == {"a": A, "b": DISPUTED}


@pytest.mark.parametrize("name", ["SHA256SUMS", "one.sha256"])
def test_a_file_with_two_digests_ends_a_start_that_compares_them(name: str) -> None:
    files = {name: f"{A}  one\n{B}  one\n{A}  other\n{B}  other\n"}
    with pytest.raises(ModelError, match=f"{name} has two digests of one; expected one for each file"):
        published(["one"], lambda names: reading(files, list(names)))


def test_two_digests_of_a_file_that_is_not_read_are_nobodys_concern() -> None:
    files = {"SHA256SUMS": f"{A}  one\n{A}  other\n{B}  other\n"}
    assert published(["one"], lambda names: reading(files, list(names))) == {"one": Expected(A, "SHA256SUMS")}


@pytest.mark.parametrize(
    "line",
    [
        f"{A[:-1]}  short",
        f"{A}g  long",
        f"{A}{A}  of SHA-512",
        f"{A[:40]}  of SHA-1",
        f"SHA512 (x) = {A}{A}",
        f"SHA256 (x) = {A[:-1]}",
        "MD5 (x) = 0",
        "<html>",
    ],
)
def test_what_is_no_sha256_is_passed_over(line: str) -> None:
    assert parse_sums(line) == {}


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum here")
@pytest.mark.parametrize("flags", [(), ("--binary",), ("--tag",)], ids=str)
def test_what_sha256sum_writes_is_understood(tmp_path: Path, flags: tuple[str, ...]) -> None:
    names = ["plain", "two words", "back\\slash", "line\nfeed", "ünïcode", "(round)"]
    for name in names:
        (tmp_path / name).write_bytes(b"a")
    written = subprocess.run(
        ["sha256sum", *flags, *names], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert parse_sums(written.stdout) == dict.fromkeys(names, A)


def reading(files: dict[str, str], asked: list[str]) -> list[str | None]:
    return [files.get(name) for name in asked]


def test_the_list_comes_first_then_the_file_beside_each() -> None:
    files = {
        "SHA256SUMS": f"{A}  one\n",
        "one.sha256": f"{B}  one\n",
        "two.sha256": B,
        "three.sha256": f"{B}  old",
    }
    asked: list[str] = []

    def read(names: Sequence[str]) -> list[str | None]:
        asked.extend(names)
        return reading(files, list(names))

    assert published(["one", "two", "three", "four"], read) == {
        "one": Expected(A, "SHA256SUMS"),
        "two": Expected(B, "two.sha256"),
        "three": Expected(B, "three.sha256"),
    }
    assert "one.sha256" not in asked


def test_a_record_holds_for_the_same_file_only(tmp_path: Path) -> None:
    records = Records(str(tmp_path))
    records.keep("/m/a", "10:5", A)
    assert records.find("/m/a", "10:5") == Expected(A, "an earlier start", recorded=True)
    assert records.find("/m/a", "10:6") is None
    assert records.find("/m/b", "10:5") is None
    assert Records("").find("/m/a", "10:5") is None


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    records = Records(str(tmp_path))
    records.keep("/m/a", "10:5", A)
    for path in (tmp_path / "digests").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    assert records.find("/m/a", "10:5") is None


def test_a_file_is_the_same_until_size_or_time_change(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    os.utime(path, ns=(7, 7))
    before = local_identity(str(path))
    shutil.copy2(path, tmp_path / "b")
    assert local_identity(str(tmp_path / "b")) == before
    os.utime(path, ns=(7, 8))
    assert local_identity(str(path)) != before
