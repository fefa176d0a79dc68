"""Loaders of files: ours, and plain readers with nothing around them; the table of all that read files."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

from hotstart.bench.load_device import ours_on_device
from hotstart.bench.load_formats import TENSORIZER_FORMAT, open_task
from hotstart.bench.load_libraries import (
    fast_safetensors,
    instanttensor,
    runai,
    runai_copied,
    safetensors,
    tensorizer,
    torch_for,
    transformers,
)
from hotstart.bench.load_loader import Load, Loaded, Loader, Task, of_images, of_torch
from hotstart.bench.load_readers import MIB, fill, map_files, read_parallel
from hotstart.config.load_formats import FORMATS


def _ours(strategy: str) -> Callable[[Task], Load]:
    def prepare(task: Task) -> Load:
        if task.format == TENSORIZER_FORMAT:
            return _our_stream(task)
        if task.kind != "cpu":
            return ours_on_device(strategy, task)
        from hotstart.loading.image import Image

        def load() -> Loaded:
            checkpoint = open_task(task)
            image = Image(checkpoint, strategy=strategy)
            image.start()
            image.wait()
            views = [memoryview(image.memory(number)) for number in range(len(checkpoint.files))]
            tensors = {
                name: views[ref.file][ref.offset : ref.offset + ref.nbytes]
                for name, ref in checkpoint.tensors.items()
            }
            return Loaded(tensors, image, image.describe())

        return load

    return prepare


def _our_stream(task: Task) -> Load:
    """As a start has it whose files only another library reads."""
    from hotstart.device import host
    from hotstart.loading.arena import Layout
    from hotstart.loading.streams.base import Request
    from hotstart.loading.streams.stream_weights import StreamWeights
    from hotstart.models.spec import WeightSpec

    torch = torch_for(task)
    for imported in (FORMATS[TENSORIZER_FORMAT].library, "hotstart.loading.streams.stream_store"):
        importlib.import_module(imported)

    def load() -> Loaded:
        checkpoint = open_task(task)
        sizes = {name: ref.nbytes for name, ref in checkpoint.tensors.items()}
        request = Request(
            load_format=TENSORIZER_FORMAT,
            paths=tuple(file.path for file in checkpoint.files),
            names=tuple(sizes),
            nbytes=checkpoint.nbytes,
            largest=max(sizes.values(), default=0),
            device=task.torch_name,
            free=host.memory().available,
            sizes=sizes,
        )
        layout = Layout.of(
            (WeightSpec(slot=name, stored=(name,), shape=ref.shape), ref)
            for name, ref in checkpoint.tensors.items()
        )
        weights = StreamWeights(
            request, layout, checkpoint, lambda: torch.device(task.torch_name), lambda done: None
        )
        weights.start()
        weights.wait()
        store = weights.store()
        return of_torch({name: store.tensor(name) for name in sizes}, task, weights.describe())

    return load


def _plain(way: str, threads: int, chunk: int) -> Callable[[Task], Load]:
    """A reader with nothing around it, into fresh memory: what the ceiling is made of."""

    def prepare(task: Task) -> Load:
        checkpoint = open_task(task) if task.format == TENSORIZER_FORMAT else None

        def load() -> Loaded:
            paths = [path for path, _ in task.files]
            if way == "map":
                images = map_files(paths, threads, chunk)
            else:
                flags = os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0)
                fds = [os.open(path, flags) for path in paths]
                images = read_parallel(
                    [size for _, size in task.files],
                    threads,
                    chunk,
                    lambda file, offset, view: fill(fds[file], offset, view),
                    whole_pages=way == "direct",
                )
            if checkpoint is None:
                return Loaded(of_images(task.files, images), images)
            refs = checkpoint.tensors.items()
            tensors = {name: images[r.file][r.offset : r.offset + r.nbytes] for name, r in refs}
            return Loaded(tensors, images)

        return load

    return prepare


OURS = "hotstart"
STRATEGIES = ("map", "direct", "buffered")
_TORCH = ("torch",)
_BOTH, _CUDA = ("cpu", "cuda"), ("cuda",)
_ALL_FORMATS = ("safetensors", "sharded_state", "tensorizer")
_BY_NAME = "needs a file of its own: it is converted, next to the temporary files, when named by --loader"
_RUNAI = FORMATS["runai_streamer"].needed, ("runai_model_streamer", *_TORCH)
_FAST = FORMATS["fastsafetensors"].needed, ("fastsafetensors", *_TORCH)

PLAIN = {
    f"plain {way}, {threads} x {chunk} MiB": Loader(_plain(way, threads, chunk * MIB), formats=_ALL_FORMATS)
    for way in ("buffered", "direct")
    for threads in (2, 4, 8)
    for chunk in (4, 16)
} | {
    "plain map": Loader(_plain("map", 0, MIB), formats=_ALL_FORMATS),
    "plain map, 4 x 16 MiB": Loader(_plain("map", 4, 16 * MIB), formats=_ALL_FORMATS),
}
"""The best of these is the ceiling of files in memory."""

LOCAL = {
    OURS: Loader(
        _ours("auto"),
        schemes=("file", "s3", "gs", "az", "http", "https"),
        devices=_BOTH,
        formats=_ALL_FORMATS,
    ),
    **{
        f"{OURS}-{name}": Loader(
            _ours(name),
            devices=("cpu",) if name == "map" else _BOTH,
            on_request=f"--read-strategy {name}",
        )
        for name in STRATEGIES
    },
    "safetensors": Loader(safetensors(False), "safetensors", ("safetensors", *_TORCH), devices=_BOTH),
    "safetensors-copy": Loader(safetensors(True), "safetensors", ("safetensors", *_TORCH)),
    "transformers": Loader(
        transformers, "transformers", ("transformers", *_TORCH), devices=_BOTH, formats=("safetensors",)
    ),
    "runai": Loader(runai, *_RUNAI, schemes=("file", "s3", "gs", "az"), devices=_BOTH),
    "runai-copy": Loader(runai_copied, *_RUNAI, schemes=("file", "s3", "gs", "az"), devices=_CUDA),
    "fastsafetensors": Loader(fast_safetensors(False), *_FAST, devices=_BOTH),
    "fastsafetensors-nogds": Loader(fast_safetensors(True), *_FAST, devices=_CUDA),
    "instanttensor": Loader(
        instanttensor, FORMATS["instanttensor"].needed, ("instanttensor", *_TORCH), devices=_CUDA
    ),
    "tensorizer": Loader(
        tensorizer,
        FORMATS["tensorizer"].needed,
        ("tensorizer", "safetensors", *_TORCH),
        devices=_BOTH,
        formats=("safetensors", "tensorizer"),
        on_request=_BY_NAME,
    ),
}
