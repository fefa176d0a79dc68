"""The pinned memory through which a GPU's bytes go: how much of it there is, for a start and for its plan."""

from __future__ import annotations

import os

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint
from hotstart.device import host
from hotstart.loading import ring as sizes
from hotstart.loading.options import LoaderOptions, Ring


class Staging(Struct, frozen=True):
    """The ring, and how many of its readers begin."""

    ring: Ring
    first: int | None
    """None: all of them."""


def staging_for(checkpoint: Checkpoint, options: LoaderOptions) -> Staging:
    """As the options, the size of the checkpoint and the memory that is free now have it."""
    default = Ring(sizes.THREADS, sizes.BUFFERS, sizes.BUFFER_BYTES)
    distant = any(not os.path.isabs(file.path) for file in checkpoint.files)
    if distant:
        default = Ring(sizes.DISTANT_THREADS, sizes.DISTANT_BUFFERS, sizes.BUFFER_BYTES)
    need = sum(file.size for file in checkpoint.files)
    ring = options.ring(default, need=need, free=host.memory().available)
    first = min(sizes.DISTANT_FIRST, ring.threads) if distant and options.concurrency is None else None
    return Staging(ring, first)
