"""What kind of checkpoint ``bench load`` was given, and its headers: plain, rank by rank, or Tensorizer's."""

from __future__ import annotations

import os

from hotstart.bench.load_loader import Task
from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.folder import Folder, LocalFolder
from hotstart.checkpoint.layout import SINGLE, open_checkpoint
from hotstart.checkpoint.sharded import open_sharded
from hotstart.checkpoint.sharded_names import Rank, find_shards
from hotstart.checkpoint.tensorizer import DEFAULT_NAME, open_tensorizer

PLAIN_FORMAT, SHARDED_FORMAT, TENSORIZER_FORMAT = "safetensors", "sharded_state", "tensorizer"
LOAD_FORMATS = {
    (PLAIN_FORMAT, "hotstart"): "auto",
    (SHARDED_FORMAT, "hotstart"): "sharded_state",
    (SHARDED_FORMAT, "runai"): "runai_streamer_sharded",
    (TENSORIZER_FORMAT, "hotstart"): "tensorizer",
}
"""What ``--load-format`` calls a loader, by the format that it reads."""


def format_of(directory: str) -> str:
    """By the names in a directory. A plain checkpoint beside other files is what is meant."""
    names = os.listdir(directory)
    shards = find_shards(names)
    sharded = {file.name for each in shards for file in each.files}
    others = [name for name in names if name.endswith(".safetensors") and name not in sharded]
    if shards and not others:
        return SHARDED_FORMAT
    if not others and SINGLE not in names and any(name.endswith(".tensors") for name in names):
        return TENSORIZER_FORMAT
    return PLAIN_FORMAT


def open_model(place: Folder | str, model_format: str) -> Checkpoint:
    """Headers; of files for several ranks, those of the first. Raises ModelError and StorageError."""
    folder = LocalFolder(place) if isinstance(place, str) else place
    if model_format == SHARDED_FORMAT:
        return open_sharded(folder, first_rank(folder.path))
    if model_format == TENSORIZER_FORMAT:
        return open_tensorizer(folder, _tensorizer_name(folder.path))
    return open_checkpoint(folder)


def open_task(task: Task) -> Checkpoint:
    """The model of a task: a start makes these connections, and signs, within its time."""
    if not task.small_files:
        return open_model(task.location, task.format)
    from hotstart.checkpoint.remote import ObjectFolder, open_store

    store = open_store(task.location, environ=os.environ, patience=60.0)
    return open_checkpoint(ObjectFolder(store, task.small_files))


def first_rank(directory: str) -> Rank:
    """Of as many as the files of a pre-sharded directory are for."""
    shards = find_shards(os.listdir(directory))[0]
    return Rank(shards.tp_size, 0, shards.pp_size, 0)


def described(directory: str, model_format: str) -> str:
    """For people: ``sharded_state, rank 0 of 2``; empty: plain."""
    if model_format == SHARDED_FORMAT:
        return f"{model_format}, {first_rank(directory)}"
    return "" if model_format == PLAIN_FORMAT else f"{model_format}, {_tensorizer_name(directory)}"


def _tensorizer_name(directory: str) -> str:
    names = sorted(name for name in os.listdir(directory) if name.endswith(".tensors"))
    return DEFAULT_NAME if DEFAULT_NAME in names or not names else names[0]
