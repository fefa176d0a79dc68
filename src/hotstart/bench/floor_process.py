"""The least that any torch-based start does, as a program: run in a fresh process, never imported.

    python floor_process.py floor DIRECTORY map|buffered|direct TOKENS
    python floor_process.py floor DIRECTORY arena TOKENS DEVICE
    python floor_process.py read DIRECTORY buffered|direct

``floor``: a plain ``import torch`` while a thread fetches the weights, then one eager forward step
of the checkpoint's shapes over its own bytes: a linear for every matrix, a norm for every vector,
one attention a layer. No server, no tokenizer, no model class. With ``arena`` the weights go to a
device by our own ring of staging buffers, which needs no torch. ``read``: only fetch the bytes, as
fast as plain parallel reads can. Prints one JSON line, in seconds of ``time.monotonic()``.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import sys
import threading
import time
from typing import Any

from hotstart.engine.main import OPENMP_SPINS

STEP = 16 << 20
THREADS = {"buffered": 2, "direct": 4}
MADV_POPULATE_READ = 22
# Bytes of an element; types that no CPU kernel multiplies are fetched and then left alone.
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Weights:
    """The files of a checkpoint, on their way into memory."""

    def __init__(self, directory: str, how: str) -> None:
        self.how = how
        names = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
        self.paths = [os.path.join(directory, name) for name in names]
        self.buffers: list[mmap.mmap] = []
        self.done = 0.0
        self._thread = threading.Thread(target=self._fetch, daemon=True)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(os.path.getsize(path) for path in self.paths)

    def start(self) -> Weights:
        """Begin to fetch."""
        self._thread.start()
        return self

    def wait(self) -> None:
        """Return when every byte is there."""
        self._thread.join()
        if not self.done:
            raise SystemExit("the weights could not be read")

    def _fetch(self) -> None:
        for path in self.paths:
            self.buffers.append(map_file(path) if self.how == "map" else read_file(path, self.how))
        self.done = time.monotonic()

    def tensors(self, torch: Any) -> Any:
        """``(name, tensor)`` of each tensor that can be multiplied."""
        for buffer in self.buffers:
            length = int.from_bytes(buffer[:8], "little")
            header = json.loads(buffer[8 : 8 + length])
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if entry["dtype"] in FLOATS:
                    dtype, shape = getattr(torch, FLOATS[entry["dtype"]]), torch.Size(entry["shape"])
                    offset = 8 + length + entry["data_offsets"][0]
                    flat = torch.frombuffer(buffer, dtype=dtype, count=shape.numel(), offset=offset)
                    yield name, flat.view(shape)


class DeviceWeights:
    """The weights of a checkpoint, on their way to a device."""

    def __init__(self, directory: str, device: str) -> None:
        from hotstart.checkpoint.layout import open_checkpoint
        from hotstart.device.choose import choose, open_device
        from hotstart.loading.arena import Arena, Layout
        from hotstart.models.spec import WeightSpec

        self.checkpoint = open_checkpoint(directory)
        self.layout = Layout.of(
            (WeightSpec(slot=name, stored=(name,), shape=ref.shape), ref)
            for name, ref in self.checkpoint.tensors.items()
        )
        opened = open_device(choose(device))
        opened.attach()
        self.arena = Arena(self.layout, opened)
        self.size = 0
        self.done = 0.0

    def start(self) -> DeviceWeights:
        """Begin to fetch."""
        from hotstart.loading.ring import Loading

        self._begin = time.monotonic()
        self._loading = Loading(self.checkpoint, self.arena)
        return self

    def wait(self) -> None:
        """Return when every byte is there."""
        report = self._loading.wait()
        self.size, self.done = report.bytes, self._begin + report.seconds

    def tensors(self, torch: Any) -> Any:
        """``(name, tensor)`` of each tensor that can be multiplied."""
        for name in self.layout.slots:
            tensor = self.arena.tensor(name)
            if tensor.is_floating_point():
                yield name, tensor


def map_file(path: str) -> mmap.mmap:
    """A private mapping with its page tables filled in steps, by a call that leaves the interpreter lock."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    for offset in range(0, len(mapped), STEP):
        libc.madvise(address + offset, min(STEP, len(mapped) - offset), MADV_POPULATE_READ)
    return mapped


def read_file(path: str, how: str) -> mmap.mmap:
    """Read by several threads into one buffer of whole pages."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0))
    size = os.fstat(fd).st_size
    buffer = mmap.mmap(-1, -(-size // STEP) * STEP)
    view = memoryview(buffer)
    offsets = iter(range(0, size, STEP))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            read_range(fd, view, offset, min(offset + STEP, size))

    workers = [threading.Thread(target=work) for _ in range(THREADS[how])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(fd)
    return buffer


def read_range(fd: int, view: memoryview, offset: int, end: int) -> None:
    """Whole pages are asked for, which direct reads need; the last one comes short."""
    while offset < end:
        got = os.preadv(fd, [view[offset : -(-end // mmap.PAGESIZE) * mmap.PAGESIZE]], offset)
        if not got:
            raise SystemExit("a weight file ended early")
        offset += got


def forward(torch: Any, weights: Weights | DeviceWeights, config: dict[str, Any], tokens: int) -> None:
    """One step over ``tokens`` tokens: the multiplications, norms and attentions of every layer."""
    linear, attention = torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention
    heads = config.get("num_attention_heads", 1)
    width = config.get("head_dim") or config.get("hidden_size", heads) // heads
    active = config.get("num_experts_per_tok", 1 << 30)
    inputs: dict[tuple[int, object], Any] = {}
    head = None
    for name, weight in weights.tensors(torch):
        like = {"dtype": weight.dtype, "device": weight.device}
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert and int(expert[1]) >= active:
            continue
        if weight.dim() == 1:
            torch.ones(tokens, weight.shape[0], **like) * weight
        elif weight.dim() == 2 and weight.shape[0] == config.get("vocab_size"):
            # The embedding is looked up, the head multiplies; tied weights do both.
            if head is None or "head" in name:
                head = weight
        elif weight.dim() == 2:
            key = weight.shape[1], weight.dtype
            if key not in inputs:
                inputs[key] = torch.randn(tokens, weight.shape[1], **like)
            linear(inputs[key], weight)
        if "o_proj" in name or "out_proj" in name:
            q = torch.randn(1, heads, tokens, width, **like)
            attention(q, q, q, is_causal=True)
    if head is not None:
        hidden = torch.randn(1, head.shape[1], dtype=head.dtype, device=head.device)
        linear(hidden, head).argmax(-1).item()


def floor(directory: str, how: str, tokens: int, device: str = "") -> dict[str, float]:
    """The whole of it, with the moments in between."""
    begin = time.monotonic()
    # Threads that spin while they wait multiply the time of a step beside a busy neighbour, and a
    # floor is the least; the engine sets the same.
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
    weights = (DeviceWeights(directory, device) if how == "arena" else Weights(directory, how)).start()
    import torch

    imported = time.monotonic()
    weights.wait()
    arrived = time.monotonic()
    with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    with torch.inference_mode():
        forward(torch, weights, config, tokens)
    return {
        "begin": begin,
        "imported": imported,
        "arrived": arrived,
        "end": time.monotonic(),
        "fetch_seconds": weights.done - begin,
        "bytes": weights.size,
    }


def read(directory: str, how: str) -> dict[str, float]:
    """Only the bytes."""
    begin = time.monotonic()
    weights = Weights(directory, how).start()
    weights.wait()
    return {"fetch_seconds": weights.done - begin, "bytes": weights.size}


if __name__ == "__main__":
    task, directory, how, *rest = sys.argv[1:]
    result = floor(directory, how, int(rest[0]), *rest[1:]) if task == "floor" else read(directory, how)
    print(json.dumps(result), flush=True)
    # Neither a driver nor torch has anything to tidy up.
    os._exit(0)
