"""Other people's loaders of files, each as its own documentation has it, with its defaults."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from hotstart.bench.load_loader import Load, Loaded, Task, of_torch

_THROUGH_MEMORY = "direct: no, because "


def torch_for(task: Task) -> Any:
    """torch, with its context on the task's GPU and its first kernel there: neither counts."""
    torch = importlib.import_module("torch")
    if task.torch_name != "cpu":
        torch.cuda.set_device(task.torch_name)
        torch.ones(1024, device=task.torch_name).clone()
        torch.cuda.synchronize()
    return torch


def _note(task: Task, reason: str) -> str:
    return "" if task.kind == "cpu" else _THROUGH_MEMORY + reason


def safetensors(copies: bool) -> Callable[[Task], Load]:
    """``load_file``."""

    def prepare(task: Task) -> Load:
        torch_for(task)
        load_file = importlib.import_module("safetensors.torch").load_file

        def load() -> Loaded:
            tensors: dict[str, Any] = {}
            for path, _ in task.files:
                loaded = load_file(path, device=task.torch_name)
                tensors.update({n: t.clone() for n, t in loaded.items()} if copies else loaded)
            return of_torch(tensors, task, _note(task, "load_file copies each tensor from memory"))

        return load

    return prepare


def transformers(task: Task) -> Load:
    """``from_pretrained``; onto a GPU by ``device_map``, which needs accelerate, else by ``to``."""
    torch = torch_for(task)
    library = importlib.import_module("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    auto = library.AutoModelForCausalLM
    with torch.device("meta"):  # the model's own classes are imports too
        auto.from_config(library.AutoConfig.from_pretrained(task.location, local_files_only=True))
    on_gpu = task.torch_name != "cpu"
    maps = on_gpu and find_spec("accelerate") is not None
    placed = {"device_map": {"": task.torch_name}} if maps else {}

    def load() -> Loaded:
        model = auto.from_pretrained(task.location, dtype="auto", local_files_only=True, **placed)
        if on_gpu and not maps:
            model = model.to(task.torch_name)
        how = "device_map" if maps else "its model is moved by to()"
        loaded = of_torch(model.state_dict(), task, _note(task, f"tensors come from memory; {how}"))
        loaded.keep = model, loaded.keep
        return loaded

    return load


def _runai(task: Task) -> tuple[Any, list[str], dict[str, Any]]:
    """The streamer's class, and what it is told."""
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
    return importlib.import_module("runai_model_streamer").SafetensorsStreamer, paths, told


def runai(task: Task) -> Load:
    """``SafetensorsStreamer``; on a GPU with its option ``device``."""
    torch_for(task)
    if task.kind == "cpu":
        # All at once, as every other loader here: by default tensors give way to later ones at 40 GB.
        os.environ.setdefault("RUNAI_STREAMER_MEMORY_LIMIT", "-1")
    streamer_class, paths, told = _runai(task)
    if task.torch_name != "cpu":
        told["device"] = task.torch_name

    def load() -> Loaded:
        streamer = streamer_class().__enter__()  # it stays open: the tensors may lie in its buffer
        streamer.stream_files(paths, **told)
        note = _note(task, "it reads into memory and copies from there")
        loaded = of_torch(dict(streamer.get_tensors()), task, note)
        loaded.keep = streamer, loaded.keep
        return loaded

    return load


def runai_copied(task: Task) -> Load:
    """``SafetensorsStreamer`` into memory, each tensor copied into one on the GPU, as vLLM does."""
    torch = torch_for(task)
    streamer_class, paths, told = _runai(task)

    def load() -> Loaded:
        streamer = streamer_class().__enter__()
        streamer.stream_files(paths, **told)
        tensors = {}
        for name, tensor in streamer.get_tensors():
            tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=task.torch_name)
            tensors[name].copy_(tensor)
        return of_torch(tensors, task, _note(task, "each tensor is copied from its buffer in memory"))

    return load


def fast_safetensors(nogds: bool) -> Callable[[Task], Load]:
    """``SafeTensorsFileLoader``; without ``nogds`` it goes on without GPUDirect Storage where that fails."""

    def prepare(task: Task) -> Load:
        torch_for(task)
        library = importlib.import_module("fastsafetensors")
        bounces = nogds or task.device == "cpu"

        def load() -> Loaded:
            with _warnings_of("fastsafetensors") as said:
                loader = library.SafeTensorsFileLoader(library.SingleGroup(), task.torch_name, nogds=bounces)
                loader.add_filenames({0: [path for path, _ in task.files]})
                buffer = loader.copy_files_to_device()
                tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
            loaded = of_torch(tensors, task, _direct(task, bounces, said, library))
            loaded.keep = loader, buffer, loaded.keep
            return loaded

        return load

    return prepare


def _direct(task: Task, bounces: bool, said: list[str], library: Any) -> str:
    """Whether it read past memory, in its own words where it has any."""
    if task.kind == "cpu":
        return ""
    if bounces:
        return "direct: no, because nogds was asked for"
    fell_back = [text for text in said if "gds" in text.lower() or "cufile" in text.lower()]
    if fell_back:
        return f"direct: no, because {fell_back[0].rstrip('.')}"
    from hotstart.loading.streams.fast_safetensors import direct

    yes, why = direct(library.cpp, task.torch_name, [path for path, _ in task.files])
    return f"direct: {'yes' if yes else 'no'}, because {why}"


@contextmanager
def _warnings_of(library: str) -> Iterator[list[str]]:
    """What a library warns of while it is used, by either way of Python's."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(library).addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
            texts += [str(each.message) for each in caught]
    finally:
        logging.getLogger(library).removeHandler(handler)


def instanttensor(task: Task) -> Load:
    """``safe_open``, whose tensors are copies of what passes through its ring."""
    from hotstart.loading.streams.instant_tensor import direct

    torch_for(task)
    library = importlib.import_module("instanttensor")

    def load() -> Loaded:
        paths = [path for path, _ in task.files]
        with library.safe_open(paths, framework="pt", device=task.torch_name) as file:
            tensors = dict(file.tensors())
        return of_torch(tensors, task, direct(file.backend.name, [path for path, _ in task.files]))

    return load


def tensorizer(task: Task) -> Load:
    """``TensorDeserializer``."""
    torch_for(task)
    library = importlib.import_module("tensorizer")
    path = task.converted or task.files[0][0]

    def load() -> Loaded:
        deserializer = library.TensorDeserializer(path, device=task.torch_name)
        note = _note(task, "it reads into pinned memory")
        loaded = of_torch(dict(deserializer.items()), task, note)
        loaded.keep = deserializer, loaded.keep
        return loaded

    return load


def convert_for_tensorizer(paths: list[str], target: str) -> None:
    """Write the tensors once more, as one file in that library's own format, onto the disk."""
    load_file = importlib.import_module("safetensors.torch").load_file
    library = importlib.import_module("tensorizer")
    serializer = library.TensorSerializer(target)
    tensors: dict[str, Any] = {}
    for path in paths:
        tensors.update(load_file(path))
    serializer.write_state_dict(tensors)
    serializer.close()
    from hotstart.storage.residency import evict

    evict(target)  # what is dirty is written out first
