"""Headers from strangers: each attack ends in the error that names it, none in a crash or a hang."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_files import STUB, file_of
from hotstart.checkpoint.safetensors import Header, parse_header, read_header
from hotstart.errors import ModelError

GOOD = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def entry(dtype: str = "F32", shape: object = (1,), begin: object = 0, end: object = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ATTACKS: dict[str, tuple[bytes, str]] = {
    "length-of-2-to-the-63": (
        (1 << 63).to_bytes(8, "little") + b"{}",
        "announce a header of 9223372036854775808",
    ),
    "length-over-the-cap": ((100_000_001).to_bytes(8, "little") + b"{}", "at most 100000000"),
    "length-beyond-the-file": ((1000).to_bytes(8, "little") + b"{}", "ends inside its header"),
    "not-json": (file_of("hello"), "header is invalid"),
    "empty-header": (file_of(""), "header is invalid"),
    "a-list": (file_of("[]"), "header is invalid"),
    "invalid-utf8": (file_of(b'{"\xff":' + GOOD.encode() + b"}", bytes(4)), "UTF-8"),
    "invalid-utf8-in-unknown-field": (
        file_of(b'{"a":' + GOOD.encode()[:-1] + b',"x":"\xff"}}', bytes(4)),
        "UTF-8",
    ),
    "deep-list": (file_of('{"a":' + "[" * 100_000), "nests too deeply"),
    "deep-object": (file_of('{"a":' * 100_000), "nests too deeply"),
    "deep-in-unknown-field": (file_of('{"a":' + GOOD[:-1] + ',"x":' + "[" * 100_000), "nests too deeply"),
    "duplicate-tensor": (file_of(f'{{"a":{GOOD},"a":{GOOD}}}', bytes(4)), "key 'a' twice"),
    "duplicate-by-escape": (file_of(f'{{"a":{GOOD},"\\u0061":{GOOD}}}', bytes(4)), "key 'a' twice"),
    "duplicate-not-ascii": (file_of(f'{{"é":{GOOD},"é":{GOOD}}}', bytes(4)), "key 'é' twice"),
    "duplicate-of-junk": (file_of(f'{{"a":0,"a":{GOOD}}}', bytes(4)), "key 'a' twice"),
    "duplicate-field": (
        file_of('{"a":{"dtype":"F64","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "key 'dtype' twice",
    ),
    "duplicate-metadata": (
        file_of(f'{{"__metadata__":{{"k":"1","k":"2"}},"a":{GOOD}}}', bytes(4)),
        "key 'k' twice",
    ),
    "duplicate-metadata-object": (
        file_of(f'{{"__metadata__":{{}},"a":{GOOD},"__metadata__":{{}}}}', bytes(4)),
        "key '__metadata__' twice",
    ),
    "metadata-of-numbers": (file_of(f'{{"__metadata__":{{"k":1}},"a":{GOOD}}}', bytes(4)), "'__metadata__'"),
    "unknown-dtype": (file_of({"a": entry(dtype="F128")}, bytes(4)), "dtype 'F128'"),
    "wrong-dtype-size": (file_of({"a": entry(dtype="F64")}, bytes(4)), "expected 8 bytes"),
    "half-a-byte": (file_of({"a": entry(dtype="F4", end=1)}, bytes(1)), "a whole number of bytes"),
    "negative-dimension": (file_of({"a": entry(shape=[-1])}, bytes(4)), "entry 'a'"),
    "negative-offset": (file_of({"a": entry(begin=-4, end=0)}, bytes(4)), "entry 'a'"),
    "reversed-offsets": (file_of({"a": entry(begin=4, end=0)}, bytes(4)), "bytes 4 to 0"),
    "fractional-offset": (file_of({"a": entry(end=4.5)}, bytes(4)), "entry 'a'"),
    "missing-offsets": (file_of({"a": {"dtype": "F32", "shape": [1]}}), "data_offsets"),
    "overflowing-shape": (
        file_of({"a": entry(shape=[2**62, 4])}, bytes(4)),
        "expected 73786976294838206464 bytes",
    ),
    "wrapping-shape": (file_of({"a": entry(shape=[2**32, 2**32, 1])}, bytes(4)), "bytes 0 to 4"),
    "too-many-dimensions": (file_of({"a": entry(shape=[1] * 65)}, bytes(4)), "65 dimensions"),
    "endless-number": (file_of('{"a":{"dtype":"F32","shape":[' + "9" * 100_000 + "]}}"), "entry 'a'"),
    "out-of-range": (file_of({"a": entry()}, bytes(3)), "1 too few"),
    "far-out-of-range": (file_of({"a": entry(begin=2**60, end=2**60 + 4)}, bytes(4)), "belong to no tensor"),
    "overlap": (file_of({"a": entry(), "b": entry(begin=2, end=6)}, bytes(6)), "before 'a' ends at 4"),
    "same-bytes-twice": (file_of({"a": entry(), "b": entry()}, bytes(4)), "before 'a' ends at 4"),
    "hole": (file_of({"a": entry(), "b": entry(begin=8, end=12)}, bytes(12)), "bytes 4 to 8"),
    "hidden-tail": (file_of({"a": entry()}, bytes(4) + b"PK\x03\x04"), "the last 4 belong to no tensor"),
    "zero-bytes": (b"", "is empty"),
    "seven-bytes": (bytes(7), "has 7 bytes"),
    "pointer-stub": (STUB, "pointer stub"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_is_refused_by_name(attack: str, tmp_path: Path) -> None:
    content, message = ATTACKS[attack]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_header(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_pipe_in_place_of_a_shard_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="is a pipe"):
        read_header(str(tmp_path / "model.safetensors"))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_header_or_a_model_error(text: bytes) -> None:
    accepted_or_refused(text, 8 + len(text))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_number = st.integers(-2, 20) | st.integers()
_entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "X"]) | _json,
        "shape": st.lists(_number, max_size=3) | _json,
        "data_offsets": st.lists(_number, min_size=1, max_size=3) | _json,
    }
)


@given(
    st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), _entry | _json, max_size=4),
    st.integers(0, 99),
)
@settings(max_examples=300)
def test_any_json_is_a_header_or_a_model_error(header: dict[str, Any], data: int) -> None:
    text = json.dumps(header).encode()
    accepted_or_refused(text, 8 + len(text) + data)


def accepted_or_refused(text: bytes, size: int) -> None:
    """Whatever is accepted satisfies what the rest of the program relies on."""
    try:
        header = parse_header("model.safetensors", size, text)
    except ModelError:
        return
    assert isinstance(header, Header)
    end = header.file.data_start
    for ref in sorted(header.tensors, key=lambda ref: (ref.offset, ref.nbytes)):
        assert ref.offset == end
        end += ref.nbytes
    assert end == size
