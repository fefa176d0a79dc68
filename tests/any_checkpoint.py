"""Hypothesis strategies for property tests of loads: any checkpoint, and any network that lets it through."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from checkpoint_files import file_of
from fault_proxy import Fault
from hotstart.checkpoint.base import Checkpoint, TensorRef
from hotstart.models.spec import DTYPES, WeightSpec

Item = tuple[WeightSpec, TensorRef]
FLOATS = ["BF16", "F16", "F32", "F64"]


@dataclass(frozen=True)
class Stored:
    """Files by name, and what a model with ``dtype`` has of them."""

    files: dict[str, bytes]
    specs: list[WeightSpec]
    dtype: str
    """torch's name."""
    slots: dict[str, Tensor]
    """What each slot must hold, bit by bit."""

    def items(self, checkpoint: Checkpoint) -> list[Item]:
        """Each specification with the tensor that a reader of the headers found."""
        return [(spec, checkpoint.tensors[spec.stored[0]]) for spec in self.specs]


@st.composite
def checkpoints(draw: st.DrawFn) -> Stored:
    """Up to three files, with slots of one to three parts that may lie in different files.

    Parts of any dtype and shape, in any order, at any alignment, with tensors between them that nobody
    asks for.
    """
    rng = draw(st.randoms(use_true_random=False))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    wanted = draw(st.sampled_from(["float32", "bfloat16"]))
    contents: list[list[tuple[str, Tensor, str]]] = [[] for _ in range(draw(st.integers(1, 3)))]
    specs: list[WeightSpec] = []
    slots: dict[str, Tensor] = {}
    for number in range(draw(st.integers(1, 5))):
        trailing = tuple(draw(st.lists(st.integers(1, 24), max_size=2)))
        parts, row = [], 0
        for part in range(draw(st.integers(1, 3))):
            dtype, name = draw(st.sampled_from(FLOATS)), f"slot{number}.part{part}"
            shape = (draw(st.integers(0, 30)), *trailing)
            tensor = torch.randn(shape, generator=generator).to(getattr(torch, DTYPES[dtype][0]))
            specs.append(WeightSpec(slot=f"slot{number}", stored=(name,), shape=shape, at=row, finish="cast"))
            contents[rng.randrange(len(contents))].append((name, tensor, dtype))
            parts.append(tensor.to(getattr(torch, wanted)))
            row += shape[0]
        slots[f"slot{number}"] = torch.cat(parts)
    for number in range(draw(st.integers(0, 2))):
        size = draw(st.integers(0, 90_000))
        unused = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        contents[rng.randrange(len(contents))].append((f"unused{number}", unused, "U8"))
    files = {}
    for number, tensors in enumerate(contents):
        rng.shuffle(tensors)
        files[f"{number}.safetensors"] = _file(tensors, padding=rng.randrange(9))
    return Stored(files, specs, wanted, slots)


def _file(tensors: Sequence[tuple[str, Tensor, str]], padding: int) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"padding": "x" * padding}}
    data = b""
    for name, tensor, dtype in tensors:
        assert tensor.numel() == prod(tensor.shape)
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    return file_of(header, data)


@st.composite
def passing_faults(draw: st.DrawFn) -> list[Fault]:
    """What a network may do to some of the requests of a load, and not for ever."""
    return [_fault(draw) for _ in range(draw(st.integers(0, 8)))]


def _fault(draw: st.DrawFn) -> Fault:
    kinds: list[dict[str, Any]] = [
        {"cut": draw(st.integers(0, 9000))},
        {"cut": draw(st.integers(0, 9000)), "reset": True},
        {"status": draw(st.sampled_from([429, 500, 503]))},
        {"chunked": draw(st.integers(1, 5000))},
        {"close_after": True},
        {"delay": draw(st.floats(0.0, 0.03))},
        {"headers": {"Content-Length": None}, "cut": draw(st.integers(0, 9000))},
        {"headers": {"Content-Range": "bytes 0-1/*"}},
        {"headers": {"Connection": "close"}},
        {"bandwidth": 300_000.0},
    ]
    kind = draw(st.sampled_from(kinds))
    return Fault(path=".safetensors", nth=draw(st.integers(1, 30)), **kind)


def same_bits(left: Tensor | tuple[Tensor, ...], right: Tensor) -> bool:
    """Also of what is no number."""
    whole = left if isinstance(left, Tensor) else torch.cat(left)
    if (whole.dtype, whole.shape) != (right.dtype, right.shape):
        return False
    one, other = (tensor.reshape(-1).view(torch.uint8) for tensor in (whole, right))
    return torch.equal(one, other)


class Turns:
    """Lets reads end in an order that a seed decides, whatever order they came in.

    Each read waits for :meth:`take`; when ``width`` of them wait, or no other is coming, one may go on.
    """

    def __init__(self, seed: int, width: int) -> None:
        self._random = random.Random(seed)
        self._width = width
        self._waiting: list[threading.Event] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self) -> None:
        """Wait until it is this read's turn."""
        mine = threading.Event()
        with self._changed:
            self._waiting.append(mine)
            self._changed.notify()
        mine.wait(60)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if len(self._waiting) < self._width and self._changed.wait(0.001 if self._waiting else None):
                    continue
                if self._waiting:
                    self._waiting.pop(self._random.randrange(len(self._waiting))).set()
            for left in self._waiting:
                left.set()
