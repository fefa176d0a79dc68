"""Where weights and KV cache live: file images and slabs on CPU, an arena and paged blocks on CUDA.

Everything that differs between the two is here; the rest of a start is the same for both.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Protocol

from hotstart.config.load_formats import is_stream
from hotstart.device import host
from hotstart.device.choose import DeviceChoice, open_device
from hotstart.engine.kv_size import CPU_FIXED, CUDA_FIXED, KVSize, Memory
from hotstart.engine.random_weights import RandomWeights
from hotstart.errors import ConfigError, ModelError
from hotstart.loading.options import LoaderOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hotstart.attention.base import AttentionBackend
    from hotstart.device.base import Device
    from hotstart.engine.assemble import Prepared
    from hotstart.engine.block_manager import BlockManager
    from hotstart.loading.arena import Arena, Layout
    from hotstart.loading.follower import Follower
    from hotstart.loading.footprint import Footprint
    from hotstart.loading.image import Image
    from hotstart.loading.image_store import ImageStore
    from hotstart.loading.ring import Loading
    from hotstart.loading.streams.base import Request
    from hotstart.messages import LoadStats
    from hotstart.models.base import Store

# Slabs beyond the running sequences keep prefixes of finished ones; they cost address space only.
_DONOR_SLABS = 64


class Weights(Protocol):
    """Weight bytes on their way into memory. ``start`` begins to read, once the checks have passed."""

    total: int

    def follow(self, follower: Follower) -> Sequence[memoryview]:
        """Tell it what arrives, if the bytes of each file lie in memory: their images. Else: nothing."""
        ...

    def start(self, done: Callable[[object], None] = ...) -> None:
        """Allocate and begin; ``done`` is called with the report when the last byte has arrived."""
        ...

    def wait(self) -> object:
        """Block until the weights can be used; raises the first error of a reader."""
        ...

    def settle(self) -> None:
        """Return when nothing beside the weights themselves is held: at once, unless some are converted.

        Raises what :meth:`wait` raises.
        """
        ...

    def describe(self) -> str:
        """How they are read and why, for the log."""
        ...

    def stats(self) -> LoadStats:
        """What was read, for the metrics; once all is."""
        ...

    def store(self) -> Store:
        """The tensors by slot. Needs torch; they may be bound before their bytes have arrived."""
        ...

    def may_copy(self, slot: str) -> bool:
        """Whether a copy of the slot, once made, can take the place of its bytes."""
        ...

    def release(self, slot: str) -> None:
        """The model uses a copy of the slot from now on."""
        ...

    def close(self) -> None:
        """Give back what only reading needed; once all is read, and best when the device is idle."""
        ...


class Placement(Protocol):
    """One kind of device. Constructing it touches nothing slow."""

    choice: DeviceChoice
    depth: int
    """Steps in flight."""
    default_batched_tokens: int
    fixed_bytes: int
    gathers: bool
    """Whether attention copies K and V before it attends."""

    def memory(self) -> Memory:
        """Limit and free bytes, as they were before the weights."""
        ...

    def attach(self) -> None:
        """Make the device's context, where it has one, before :meth:`weights` would: it takes a while."""
        ...

    def footprint(self, prepared: Prepared) -> Footprint:
        """What the weights will occupy."""
        ...

    def weights(self, prepared: Prepared, progress: Callable[[int], None]) -> Weights:
        """Open files, and the device; nothing is allocated or read yet."""
        ...

    def device(self) -> torch.device:
        """Needs torch."""
        ...

    def block_size(self, prepared: Prepared) -> int:
        """Tokens per KV block."""
        ...

    def kv_cache(self, prepared: Prepared, kv: KVSize) -> tuple[AttentionBackend, BlockManager]:
        """The attention back end with its memory, and its bookkeeping. Needs torch."""
        ...


def place(choice: DeviceChoice) -> Placement:
    """The placement for a device."""
    return CudaPlacement(choice) if choice.kind == "cuda" else CpuPlacement(choice)


class CpuPlacement:
    """See :class:`Placement`."""

    depth = 1
    default_batched_tokens = 2048
    fixed_bytes = CPU_FIXED
    gathers = False

    def __init__(self, choice: DeviceChoice) -> None:
        self.choice = choice
        self._memory = host.memory()  # now: when the cache is sized, weights have begun to arrive

    def memory(self) -> Memory:
        """See :class:`Placement`."""
        memory = self._memory
        return Memory("the CPU", memory.limit, memory.limited_by, memory.available)

    def attach(self) -> None:
        """See :class:`Placement`."""

    def footprint(self, prepared: Prepared) -> Footprint:
        """See :class:`Placement`."""
        from hotstart.loading import footprint

        if prepared.config.load.load_format == "dummy":
            return footprint.Footprint(prepared.matched.nbytes, prepared.matched.nbytes)
        if is_stream(prepared.config.load.load_format):
            return _footprint_of_stream(prepared)
        return footprint.of_images(prepared.checkpoint, prepared.matched)

    def weights(self, prepared: Prepared, progress: Callable[[int], None]) -> Weights:
        """See :class:`Placement`."""
        if prepared.config.load.load_format == "dummy":
            return RandomWeights(prepared)
        if is_stream(prepared.config.load.load_format):
            return _stream_weights(prepared, self.device, progress)
        from hotstart.loading.image import Image

        load = prepared.config.load
        image = Image(
            prepared.checkpoint,
            strategy=load.read_strategy,
            readers=LoaderOptions.parse(load.model_loader_extra_config).concurrency,
            patience=load.storage_timeout,
            progress=progress,
        )
        return _ImageWeights(image, prepared)

    def device(self) -> torch.device:
        """See :class:`Placement`."""
        import torch

        return torch.device("cpu")

    def block_size(self, prepared: Prepared) -> int:
        """See :class:`Placement`."""
        from hotstart.engine.block_manager import HASH_BLOCK

        return HASH_BLOCK

    def kv_cache(self, prepared: Prepared, kv: KVSize) -> tuple[AttentionBackend, BlockManager]:
        """See :class:`Placement`."""
        import torch

        from hotstart.attention.sdpa_slab import SdpaSlab
        from hotstart.engine.block_manager import SlabManager

        specs = prepared.geometry.attention()
        _refuse(SdpaSlab.refuse(specs))
        slabs = prepared.max_num_seqs + _DONOR_SLABS
        attention = SdpaSlab(specs, slabs, kv.max_model_len, getattr(torch, prepared.matched.dtype))
        blocks = SlabManager(
            slabs, kv.tokens, prefix_caching=prepared.prefix_caching, free_pages=attention.release
        )
        return attention, blocks


class _ImageWeights:
    """:class:`Weights` of a CPU: views of the file images."""

    def __init__(self, image: Image, prepared: Prepared) -> None:
        self.total = image.total
        self.start = image.start
        self.wait = image.wait
        self.describe = image.describe
        self.stats = image.stats
        self.close = image.close
        self._image = image
        self._prepared = prepared
        self._store: ImageStore | None = None

    def follow(self, follower: Follower) -> Sequence[memoryview]:
        """See :class:`Weights`."""
        self._image.follow(follower)
        files = self._prepared.checkpoint.files
        return [memoryview(self._image.memory(number)) for number in range(len(files))]

    def settle(self) -> None:
        """See :class:`Weights`. Tensors that are converted have been when they are bound."""

    def store(self) -> Store:
        """See :class:`Weights`."""
        import torch

        from hotstart.loading.image_store import ImageStore

        matched = self._prepared.matched
        aliases = {spec.slot: spec.alias_of for spec in matched.tied if spec.alias_of}
        self._store = ImageStore(self._image, list(matched.loads), aliases, getattr(torch, matched.dtype))
        return self._store

    def may_copy(self, slot: str) -> bool:
        """See :class:`Weights`."""
        assert self._store is not None
        return self._store.may_release(slot)

    def release(self, slot: str) -> None:
        """See :class:`Weights`."""
        assert self._store is not None
        self._store.release(slot)


class CudaPlacement:
    """See :class:`Placement`. The context is created beside the import of torch."""

    depth = 2
    default_batched_tokens = 8192
    fixed_bytes = CUDA_FIXED
    gathers = True

    def __init__(self, choice: DeviceChoice) -> None:
        self.choice = choice
        self._device: Device | None = None
        self._free: int | None = None

    def memory(self) -> Memory:
        """See :class:`Placement`. Before :meth:`attach`, by NVML, which needs no context.

        A frontend asks while its engine, a child, creates the context: what children hold is ours.
        Contexts of ours count as free in either case, since ``fixed_bytes`` has them.
        """
        from hotstart.device import nvml

        info = self.choice.info
        free = self._free
        if free is None:
            held = [holder.bytes for holder in nvml.holders(info.uuid) if not host.is_child(holder.pid)]
            free = info.total - sum(held)
        return Memory(info.name, info.total, "the GPU's memory", free)

    def attach(self) -> None:
        """See :class:`Placement`."""
        if self._device is None:
            self._device = open_device(self.choice)
            self._free = _free_but_for_context(self._device)

    def footprint(self, prepared: Prepared) -> Footprint:
        """See :class:`Placement`."""
        from hotstart.loading import footprint

        if prepared.config.load.load_format == "dummy":
            return footprint.Footprint(prepared.matched.nbytes, prepared.matched.nbytes)
        if is_stream(prepared.config.load.load_format):
            return _footprint_of_stream(prepared)
        return footprint.of_arena(_layout(prepared))

    def weights(self, prepared: Prepared, progress: Callable[[int], None]) -> Weights:
        """See :class:`Placement`. Raises ConfigError for a way of reading that only a CPU has."""
        if prepared.config.load.read_strategy == "map":
            raise ConfigError(
                "--read-strategy map on a GPU: a mapped file would be copied to pinned memory page by page",
                expected="auto, buffered or direct",
            )
        self.attach()
        assert self._device is not None
        if prepared.config.load.load_format == "dummy":
            return RandomWeights(prepared)
        if is_stream(prepared.config.load.load_format):
            return _stream_weights(prepared, self.device, progress)
        return _ArenaWeights(self._device, prepared, progress)

    def device(self) -> torch.device:
        """See :class:`Placement`."""
        import torch

        device = torch.device(self.choice.torch_name)
        torch.cuda.set_device(device)
        return device

    def block_size(self, prepared: Prepared) -> int:
        """See :class:`Placement`."""
        return prepared.config.cache.block_size

    def kv_cache(self, prepared: Prepared, kv: KVSize) -> tuple[AttentionBackend, BlockManager]:
        """See :class:`Placement`."""
        import torch

        from hotstart.attention.sdpa_paged import SdpaPaged
        from hotstart.engine.block_manager import PagedBlockManager

        specs = prepared.geometry.attention()
        _refuse(SdpaPaged.refuse(specs))
        size = self.block_size(prepared)
        blocks = kv.tokens // size + 1  # one more: block 0 takes the padding rows of captured graphs
        attention = SdpaPaged(specs, blocks, size, getattr(torch, prepared.matched.dtype), self.device())
        return attention, PagedBlockManager(blocks, size, prefix_caching=prepared.prefix_caching)


def _free_but_for_context(device: Device) -> int:
    """Bytes free before this process had a context; makes it.

    The Python API may run in a process that has one already: what that holds is not ours.
    """

    def held() -> int:
        return sum(holder.bytes for holder in device.holders() if holder.pid == os.getpid())

    before = held()
    free = device.memory().free
    return free + max(0, held() - before)


class _ArenaWeights:
    """:class:`Weights` of a GPU: an arena that a ring of pinned buffers fills."""

    def __init__(self, device: Device, prepared: Prepared, progress: Callable[[int], None]) -> None:
        from hotstart.loading.choice import choose_for_gpu

        self.total = prepared.matched.nbytes
        self._checkpoint = prepared.checkpoint
        self._patience = prepared.config.load.storage_timeout
        load = prepared.config.load
        self._choices = choose_for_gpu(
            prepared.checkpoint.files, load.read_strategy, again=load.verify == "digest"
        )
        self._options = LoaderOptions.parse(prepared.config.load.model_loader_extra_config)
        self._progress = progress
        self._layout = _layout(prepared)
        self._device = device
        self._arena: Arena | None = None
        self._loading: Loading | None = None

    def follow(self, follower: Follower) -> Sequence[memoryview]:
        """See :class:`Weights`."""
        return ()

    def start(self, done: Callable[[object], None] = lambda report: None) -> None:
        """See :class:`Weights`. The frontend's checks count free memory until they have passed."""
        from hotstart.loading.arena import Arena
        from hotstart.loading.ring import Loading
        from hotstart.loading.staging import staging_for

        self._arena = Arena(self._layout, self._device)
        staging = staging_for(self._checkpoint, self._options)
        ring = staging.ring
        self._loading = loading = Loading(
            self._checkpoint,
            self._arena,
            choices=self._choices,
            threads=ring.threads,
            first=staging.first,
            buffers=ring.buffers,
            buffer_bytes=ring.buffer_bytes,
            patience=self._patience,
            progress=self._progress,
        )

        def watch() -> None:
            try:
                done(loading.wait())
            except Exception:
                return  # raised again where somebody waits

        threading.Thread(target=watch, name="weights", daemon=True).start()

    def wait(self) -> object:
        """See :class:`Weights`."""
        assert self._loading is not None
        assert self._arena is not None
        report = self._loading.wait()
        self._arena.finish()
        return report

    def settle(self) -> None:
        """See :class:`Weights`. What is cast lies in staging memory until all of it has arrived."""
        if self._layout.staging_bytes:
            self.wait()

    def describe(self) -> str:
        """See :class:`Weights`."""
        assert self._loading is not None
        return self._loading.describe()

    def stats(self) -> LoadStats:
        """See :class:`Weights`."""
        assert self._loading is not None
        return self._loading.stats()

    def store(self) -> Store:
        """See :class:`Weights`."""
        assert self._arena is not None
        return self._arena

    def may_copy(self, slot: str) -> bool:
        """See :class:`Weights`. Slots of an arena are whole, and its memory is one piece."""
        return False

    def release(self, slot: str) -> None:
        """See :class:`Weights`."""

    def close(self) -> None:
        """See :class:`Weights`. Pinned memory and streams go back."""
        assert self._loading is not None
        self._loading.close()


def _stream_weights(
    prepared: Prepared, device: Callable[[], torch.device], progress: Callable[[int], None]
) -> Weights:
    from hotstart.loading.streams.stream_weights import StreamWeights

    return StreamWeights(_request(prepared), _layout(prepared), prepared.checkpoint, device, progress)


def _footprint_of_stream(prepared: Prepared) -> Footprint:
    from hotstart.loading.footprint import of_stream
    from hotstart.loading.streams.base import buffer_of

    request = _request(prepared)
    return of_stream(_layout(prepared), request.largest, buffer_of(request))


def _request(prepared: Prepared) -> Request:
    from hotstart.loading.streams.base import request_for

    load, choice = prepared.config.load, prepared.placement.choice
    device = choice.torch_name if choice.kind == "cuda" else "cpu"
    return request_for(prepared.checkpoint, prepared.matched, load, device, host.memory().available)


def _layout(prepared: Prepared) -> Layout:
    from hotstart.loading.arena import Layout

    matched = prepared.matched
    return Layout.of(matched.loads, dtype=matched.dtype, tied=matched.tied)


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ModelError("no attention back end can run this model: " + "; ".join(reasons))
