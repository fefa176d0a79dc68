"""Tensors by name, in any order, of any dtype, into fused slots: the bits that each slot must hold."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from any_checkpoint import Stored, checkpoints, same_bits
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.errors import ModelError
from hotstart.loading.arena import Layout
from hotstart.loading.streams.stream_store import StreamStore


def opened(stored: Stored, folder: Path) -> tuple[StreamStore, list[tuple[str, Tensor]]]:
    """An empty store, and what a library that knows the format reads from the files."""
    tensors = []
    for name, content in stored.files.items():
        (folder / name).write_bytes(content)
        with safe_open(folder / name, "pt") as file:
            tensors += [(key, file.get_tensor(key)) for key in file.keys()]  # noqa: SIM118 - no mapping
    checkpoint = open_checkpoint(str(folder))
    layout = Layout.of(stored.items(checkpoint), dtype=stored.dtype)
    cpu = torch.device("cpu")
    return StreamStore(layout, cpu, stored=checkpoint.tensors, library="a library"), tensors


@settings(max_examples=40, deadline=None)
@given(stored=checkpoints(), seed=st.integers(0, 2**32))
def test_whatever_comes_in_whatever_order_is_put_where_it_belongs(stored: Stored, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, tensors = opened(stored, Path(folder))
        random.Random(seed).shuffle(tensors)
        taken = sum(store.put(name, tensor) for name, tensor in tensors)
        store.finish()
        wanted = {spec.stored[0] for spec in stored.specs}
        assert taken == sum(t.numel() * t.element_size() for name, t in tensors if name in wanted)
        for slot, expected in stored.slots.items():
            assert same_bits(store.tensor(slot), expected), slot


@settings(max_examples=10, deadline=None)
@given(stored=checkpoints(), data=st.data())
def test_one_tensor_that_does_not_come_is_missed(stored: Stored, data: st.DataObject) -> None:
    missing = data.draw(st.sampled_from([spec.stored[0] for spec in stored.specs]))
    with tempfile.TemporaryDirectory() as folder:
        store, tensors = opened(stored, Path(folder))
        for name, tensor in tensors:
            if name != missing:
                store.put(name, tensor)
        with pytest.raises(ModelError, match=f"a library ended without 1 tensor: .*{missing}"):
            store.finish()
