"""Headers that are in order: whatever the reference library writes is read as it was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hotstart.checkpoint.safetensors import read_header

_DTYPES = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "U8": np.uint8, "BOOL": np.bool_}
_text = st.text(st.characters(codec="utf-8"), max_size=8)
_names = _text.filter(lambda name: name != "__metadata__")
_tensor = st.tuples(st.sampled_from(list(_DTYPES)), st.lists(st.integers(0, 4), max_size=3))


@given(st.dictionaries(_names, _tensor, max_size=5), st.dictionaries(_text, _text, max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_files_of_the_reference_library(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    path = tmp_path / "model.safetensors"
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        name: random.integers(0, 2, shape).astype(_DTYPES[dtype]) for name, (dtype, shape) in tensors.items()
    }
    save_file(arrays, path, metadata or None)
    header = read_header(str(path), file=3)
    data = path.read_bytes()
    assert header.file.metadata == metadata
    assert {ref.name for ref in header.tensors} == set(tensors)
    for ref in header.tensors:
        dtype, shape = tensors[ref.name]
        assert (ref.dtype, list(ref.shape), ref.file) == (dtype, shape, 3)
        assert data[ref.offset : ref.offset + ref.nbytes] == arrays[ref.name].tobytes()


def test_spaces_that_align_the_data_are_part_of_the_header(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(64)
    (tmp_path / "a").write_bytes((64).to_bytes(8, "little") + text + b"abcd")
    [ref] = read_header(str(tmp_path / "a")).tensors
    assert (ref.offset, ref.nbytes) == (72, 4)


def test_file_without_tensors_is_in_order(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert read_header(str(tmp_path / "a")).tensors == ()
