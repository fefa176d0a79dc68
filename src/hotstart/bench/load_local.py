"""Loaders of files: ours, other people's, and plain readers with nothing around them.

A library runs as its own documentation has it, with its defaults.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from hotstart.bench.load_loader import Load, Loaded, Loader, Task, of_images, of_torch
from hotstart.bench.load_readers import MIB, map_files, read_parallel
from hotstart.config.load_formats import FORMATS


def _ours(strategy: str) -> Callable[[Task], Load]:
    def prepare(task: Task) -> Load:
        from hotstart.checkpoint.folder import Folder, LocalFolder
        from hotstart.checkpoint.layout import open_checkpoint
        from hotstart.loading.image import Image

        if task.small_files:
            # A start makes these connections, and signs, within its time.
            from hotstart.checkpoint.remote import ObjectFolder, open_store

            def folder() -> Folder:
                return ObjectFolder(
                    open_store(task.location, environ=os.environ, patience=60.0), task.small_files
                )
        else:

            def folder() -> Folder:
                return LocalFolder(task.location)

        def load() -> Loaded:
            checkpoint = open_checkpoint(folder())
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


def _plain(way: str, threads: int, chunk: int) -> Callable[[Task], Load]:
    """A reader with nothing around it, into fresh memory: what the ceiling is made of."""

    def prepare(task: Task) -> Load:
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
                    lambda file, offset, view: _pread(fds[file], offset, view),
                    whole_pages=way == "direct",
                )
            return Loaded(of_images(task.files, images), images)

        return load

    return prepare


def _pread(fd: int, offset: int, view: memoryview) -> None:
    """Fill a view that may reach past the file's end, up to the end of its page."""
    size = os.fstat(fd).st_size
    while len(view) and offset < size:
        got = os.preadv(fd, [view], offset)
        if not got:
            raise OSError("a weight file ended early")
        view, offset = view[got:], offset + got


def _safetensors(copies: bool) -> Callable[[Task], Load]:
    def prepare(task: Task) -> Load:
        load_file = importlib.import_module("safetensors.torch").load_file

        def load() -> Loaded:
            tensors: dict[str, Any] = {}
            for path, _ in task.files:
                mapped = load_file(path)
                tensors.update({n: t.clone() for n, t in mapped.items()} if copies else mapped)
            return of_torch(tensors)

        return load

    return prepare


def _transformers(task: Task) -> Load:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    auto = transformers.AutoModelForCausalLM
    with torch.device("meta"):  # the model's own classes are imports too
        auto.from_config(transformers.AutoConfig.from_pretrained(task.location, local_files_only=True))

    def load() -> Loaded:
        model = auto.from_pretrained(task.location, dtype="auto", local_files_only=True)
        loaded = of_torch(model.state_dict())
        loaded.keep = model, loaded.keep
        return loaded

    return load


def _runai(task: Task) -> Load:
    # All at once, as every other loader here: by default tensors give way to later ones at 40 GB.
    os.environ.setdefault("RUNAI_STREAMER_MEMORY_LIMIT", "-1")
    paths = [path for path, _ in task.files]
    told: dict[str, Any] = {}
    if task.small_files:
        from hotstart.loading.streams.handed_over import for_runai
        from hotstart.loading.streams.runai_streamer import addresses
        from hotstart.storage.cloud_settings import settings_for
        from hotstart.storage.location import parse_location

        location = parse_location(task.location)
        handed = for_runai(location, settings_for(location, os.environ))
        os.environ.update({**handed.defaults, **handed.variables})
        paths = addresses(location, paths)
        if handed.s3 is not None:
            tools = importlib.import_module("runai_model_streamer.s3_utils.s3_utils")
            told["s3_credentials"] = tools.S3Credentials(**handed.s3)
    streamer_class = importlib.import_module("runai_model_streamer").SafetensorsStreamer

    def load() -> Loaded:
        streamer = streamer_class().__enter__()  # it stays open: the tensors lie in its buffer
        streamer.stream_files(paths, **told)
        loaded = of_torch(dict(streamer.get_tensors()))
        loaded.keep = streamer, loaded.keep
        return loaded

    return load


def _fastsafetensors(task: Task) -> Load:
    library = importlib.import_module("fastsafetensors")

    def load() -> Loaded:
        loader = library.SafeTensorsFileLoader(library.SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: [path for path, _ in task.files]})
        buffer = loader.copy_files_to_device()
        loaded = of_torch({name: buffer.get_tensor(name) for name in loader.get_keys()})
        loaded.keep = loader, buffer, loaded.keep
        return loaded

    return load


def _tensorizer(task: Task) -> Load:
    library = importlib.import_module("tensorizer")

    def load() -> Loaded:
        deserializer = library.TensorDeserializer(task.converted, device="cpu")
        loaded = of_torch(dict(deserializer.items()))
        loaded.keep = deserializer, loaded.keep
        return loaded

    return load


def convert_for_tensorizer(paths: list[str], target: str) -> None:
    """Write the tensors once more, as one file in that library's own format."""
    load_file = importlib.import_module("safetensors.torch").load_file
    library = importlib.import_module("tensorizer")
    serializer = library.TensorSerializer(target)
    tensors: dict[str, Any] = {}
    for path in paths:
        tensors.update(load_file(path))
    serializer.write_state_dict(tensors)
    serializer.close()


OURS = "hotstart"
STRATEGIES = ("map", "direct", "buffered")
_TORCH = ("torch",)
_BY_NAME = "needs a file of its own: it is converted, next to the temporary files, when named by --loader"

PLAIN = {
    f"plain {way}, {threads} x {chunk} MiB": Loader(_plain(way, threads, chunk * MIB))
    for way in ("buffered", "direct")
    for threads in (2, 4, 8)
    for chunk in (4, 16)
} | {
    "plain map": Loader(_plain("map", 0, MIB)),
    "plain map, 4 x 16 MiB": Loader(_plain("map", 4, 16 * MIB)),
}
"""The best of these is the ceiling of files."""

LOCAL = {
    OURS: Loader(_ours("auto"), schemes=("file", "s3", "gs", "az", "http", "https")),
    **{f"{OURS}-{name}": Loader(_ours(name), on_request=f"--read-strategy {name}") for name in STRATEGIES},
    "safetensors": Loader(_safetensors(False), "safetensors", ("safetensors", *_TORCH)),
    "safetensors-copy": Loader(_safetensors(True), "safetensors", ("safetensors", *_TORCH)),
    "transformers": Loader(_transformers, "transformers", ("transformers", *_TORCH)),
    "runai": Loader(
        _runai,
        FORMATS["runai_streamer"].needed,
        ("runai_model_streamer", *_TORCH),
        schemes=("file", "s3", "gs", "az"),
    ),
    "fastsafetensors": Loader(
        _fastsafetensors, FORMATS["fastsafetensors"].needed, ("fastsafetensors", *_TORCH)
    ),
    "tensorizer": Loader(
        _tensorizer, FORMATS["tensorizer"].needed, ("tensorizer", "safetensors", *_TORCH), on_request=_BY_NAME
    ),
}
