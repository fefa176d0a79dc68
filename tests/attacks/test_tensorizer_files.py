"""Tensorizer files from strangers: whatever their index says ends in a named error, not in a crash."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotstart.checkpoint.tensorizer import open_tensorizer
from hotstart.errors import ModelError


def entry(
    name: bytes = b"a", dtype: bytes = b"<f4", shape: tuple[int, ...] = (2,), at: int = 0, size: int = 8
) -> bytes:
    return (
        struct.pack(f"<H{len(name)}sBB{len(dtype)}s", len(name), name, 2, len(dtype), dtype)
        + struct.pack(f"<B{len(shape)}I", len(shape), *shape)
        + struct.pack("<QQQ", 0, at, size)
    )


def file_of(*entries: bytes, count: int | None = None, length: int | None = None, data: int = 64) -> bytes:
    """Version 2, with so many bytes of data behind the index."""
    index = b"".join(entries)
    front = struct.pack(
        "<5sI32sQ8xQQ",
        b"|TZR|",
        2,
        b"",
        0,
        len(entries) if count is None else count,
        len(index) if length is None else length,
    )
    return front + index + bytes(data)


BEGIN = len(file_of(entry(), data=0))
ATTACKS = {
    "a billion tensors": (file_of(entry(at=BEGIN), count=10**9), "cannot be read"),
    "an index of a gigabyte": (file_of(entry(at=BEGIN), length=1 << 30), "is said to have"),
    "an index longer than the file": (file_of(entry(at=BEGIN), length=1 << 20), "ends inside its index"),
    "a tensor inside the index": (file_of(entry(at=3)), "is said to have 8 bytes at 3"),
    "a tensor beyond the file": (file_of(entry(at=BEGIN + 60)), "ends inside the tensor 'a'"),
    "a tensor at the end of all numbers": (file_of(entry(at=2**64 - 1)), "ends inside the tensor 'a'"),
    "more bytes than its shape": (file_of(entry(at=BEGIN, size=16)), "and 8 by its shape"),
    "a shape of all bytes there are": (file_of(entry(at=BEGIN, shape=(2**32 - 1,) * 60)), "by its shape"),
    "too many dimensions": (file_of(entry(at=BEGIN, shape=(1,) * 200)), "200 dimensions"),
    "a name twice": (file_of(entry(at=2000), entry(at=2000), data=4000), "a name twice"),
    "a name that is no text": (file_of(entry(name=b"\xff", at=BEGIN)), "cannot be read"),
    "a dtype of objects": (file_of(entry(dtype=b"|O8", at=BEGIN)), "cannot be read"),
    "a dtype that nobody knows": (file_of(entry(dtype=b"<V2\0torch.evil", at=BEGIN)), "cannot be read"),
    "numbers the other way round": (file_of(entry(dtype=b">f4", at=BEGIN)), "cannot be read"),
    "no values": (file_of(entry(at=BEGIN, size=0)), "without its values"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_ends_in_the_error_that_names_it(attack: str, tmp_path: Path) -> None:
    data, message = ATTACKS[attack]
    (tmp_path / "model.tensors").write_bytes(data)
    with pytest.raises(ModelError) as caught:
        open_tensorizer(str(tmp_path))
    assert message in str(caught.value)


@given(st.binary(max_size=12), st.integers(0, 400), st.integers(0, 12))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_read_or_refused(tmp_path: Path, damage: bytes, at: int, gone: int) -> None:
    """Bytes are replaced, others cut out behind them: a range inside the file, or an error of ours."""
    begin = len(file_of(entry(), entry(b"b" * 30, b"<V2\0torch.bfloat16", (2, 2)), data=0))
    whole = file_of(entry(at=begin), entry(b"b" * 30, b"<V2\0torch.bfloat16", (2, 2), begin + 8), data=64)
    data = whole[:at] + damage + whole[at + len(damage) + gone :]
    (tmp_path / "model.tensors").write_bytes(data)
    try:
        found = open_tensorizer(str(tmp_path))
    except ModelError:
        return
    for ref in found.tensors.values():
        assert 0 <= ref.offset <= ref.offset + ref.nbytes <= len(data)
