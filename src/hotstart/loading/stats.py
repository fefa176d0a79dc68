"""What a load has read, by where it lay and how it was read: for the metrics of a server. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hotstart.checkpoint.base import Checkpoint, ShardFile
from hotstart.loading.choice import Choice
from hotstart.loading.tally import Tally
from hotstart.messages import BytesRead, LoadStats

DISK_COPY = "disk_copy"
"""The source of what an earlier start copied from a store."""


def stats_of(
    checkpoint: Checkpoint, choices: Sequence[Choice], tally: Tally, *, taken_over: int = 0
) -> LoadStats:
    """Of a load by our own readers. ``taken_over``: reads of files that hung and were made again."""
    read: dict[tuple[str, str], int] = {}
    for (number, way), nbytes in tally.ways.items():
        key = source_of(checkpoint, checkpoint.files[number], choices[number]), way
        read[key] = read.get(key, 0) + nbytes
    told = [
        (file.size, choice.resident)
        for file, choice in zip(checkpoint.files, choices, strict=True)
        if choice.known and choice.strategy != "ranges"
    ]
    size = sum(nbytes for nbytes, _ in told)
    store = getattr(checkpoint.folder, "store", None)
    return LoadStats(
        read=[BytesRead(*key, nbytes) for key, nbytes in sorted(read.items())],
        longest_stall=tally.report().longest_stall,
        resident=sum(nbytes * share for nbytes, share in told) / size if size else None,
        retried=store.speed.retried if store is not None else 0,
        replaced=taken_over + (store.speed.replaced if store is not None else 0),
    )


def stats_of_stream(checkpoint: Checkpoint, load_format: str, tally: Tally) -> LoadStats:
    """Of a load by another library, whose own way of reading is not known."""
    sources = {source_of(checkpoint, file) for file in checkpoint.files}
    source = sources.pop() if len(sources) == 1 else "several"
    return LoadStats(
        read=[BytesRead(source, load_format, tally.done)], longest_stall=tally.report().longest_stall
    )


def source_of(checkpoint: Checkpoint, file: ShardFile, choice: Choice | None = None) -> str:
    """The scheme of a store, :data:`DISK_COPY`, or the type of the file system."""
    if not os.path.isabs(file.path):
        return file.path.partition("://")[0]
    if getattr(checkpoint.folder, "copies", None) is not None:
        return DISK_COPY
    return choice.mount.fs_type if choice is not None and choice.mount is not None else "file"
