"""From settings to a running engine, in the order of a start. The first half never touches torch.

:func:`prepare` reads headers and small files; :func:`open_weights` decides how bytes come in;
:func:`build` needs torch, binds the model to the weights and sizes the KV cache by arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint, ModelFiles
from hotstart.checkpoint.files import load_model_files
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.device import host
from hotstart.engine.kv_size import CPU_FIXED, KVSize, Memory, Need, activation_bytes, kv_size
from hotstart.errors import ModelError
from hotstart.loading.match import Matched, match
from hotstart.models.base import Family, Geometry
from hotstart.models.registry import family_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotstart.config.settings import Config
    from hotstart.engine.core import Engine
    from hotstart.loading.image import Image
    from hotstart.models.base import Model, Store

DEFAULT_MAX_NUM_SEQS = 256
_CPU_BATCHED_TOKENS = 2048
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Slabs beyond the running sequences keep prefixes of finished ones; they cost address space only.
_DONOR_SLABS = 64


class Prepared(Struct):
    """What is known of a model before torch is there."""

    config: Config
    files: ModelFiles
    family: Family
    geometry: Geometry
    checkpoint: Checkpoint
    matched: Matched

    @property
    def max_num_seqs(self) -> int:
        """Running requests at most."""
        return self.config.scheduler.max_num_seqs or DEFAULT_MAX_NUM_SEQS

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens per step at most."""
        return self.config.scheduler.max_num_batched_tokens or _CPU_BATCHED_TOKENS

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: those of generation_config.json, else of config.json."""
        found: list[int] = []
        for source in (self.files.generation_config or {}, self.files.config):
            value = source.get("eos_token_id")
            found += [value] if isinstance(value, int) else value if isinstance(value, list) else []
        return tuple(dict.fromkeys(found))


class Built(Struct):
    """A running engine and what there is to say about it."""

    engine: Engine
    kv: KVSize
    device: str
    dtype: str


def prepare(config: Config) -> Prepared:
    """Read and match everything but weights. Raises ModelError, StorageError, ProblemsFound."""
    files = load_model_files(config.model.path, overrides=config.model.hf_overrides)
    family = family_for(files.config)
    geometry = family.geometry(files.config)
    checkpoint = open_checkpoint(config.model.path, ignore_index=config.model.ignore_index)
    matched = match(family.specs(geometry), checkpoint, config.model.dtype)
    return Prepared(config, files, family, geometry, checkpoint, matched)


def open_weights(prepared: Prepared, progress: Callable[[int], None]) -> Image:
    """The file images, not yet reading."""
    from hotstart.loading.image import Image

    return Image(prepared.checkpoint, strategy=prepared.config.load.read_strategy, progress=progress)


def size_kv(prepared: Prepared) -> KVSize:
    """The KV cache that fits beside everything else. Raises DeviceError."""
    config, g = prepared.config, prepared.geometry
    size = _DTYPE_BYTES[prepared.matched.dtype]
    memory = host.memory()
    # A mapped file is counted by the kernel as cache and a copy as memory; either way it is there once.
    need = Need(
        weights=prepared.matched.nbytes,
        activations=activation_bytes(
            tokens=prepared.max_num_batched_tokens,
            seqs=prepared.max_num_seqs,
            hidden=g.hidden_size,
            intermediate=g.intermediate_size,
            qkv=(g.heads + 2 * g.kv_heads) * g.head_dim,
            vocab=g.vocab_size,
            dtype_bytes=size,
        ),
        fixed=CPU_FIXED,
        kv_per_token=g.kv_bytes_per_token(size),
    )
    return kv_size(
        Memory("cpu", memory.limit, memory.limited_by, memory.available),
        need,
        utilization=config.cache.gpu_memory_utilization,
        requested=config.cache.kv_cache_memory_bytes,
        max_model_len=config.model.max_model_len,
        model_max_len=g.max_position_embeddings,
        block_size=16,
    )


def build(prepared: Prepared, image: Image) -> Built:
    """Bind the model to the image and make the engine around it. Imports torch."""
    import torch

    from hotstart.loading.image_store import ImageStore

    dtype = getattr(torch, prepared.matched.dtype)
    aliases = {spec.slot: spec.alias_of for spec in prepared.matched.tied if spec.alias_of}
    store = ImageStore(image, list(prepared.matched.loads), aliases, dtype)
    threads = prepared.config.device.threads or host.cores().count
    torch.set_num_threads(threads)
    kv = size_kv(prepared)
    model = bind_model(prepared, store, torch.device("cpu"), kv.max_model_len)
    return Built(
        _engine_on_cpu(prepared, model, kv, dtype), kv, f"cpu, {threads} threads", prepared.matched.dtype
    )


def bind_model(prepared: Prepared, store: Store, device: object, max_positions: int) -> Model:
    """The family's forward over a store."""
    import torch

    assert isinstance(device, torch.device)
    dtype = getattr(torch, prepared.matched.dtype)
    return prepared.family.build(
        prepared.geometry, store, dtype=dtype, device=device, max_positions=max_positions
    )


def _engine_on_cpu(prepared: Prepared, model: Model, kv: KVSize, dtype: object) -> Engine:
    import torch

    from hotstart.attention.sdpa_slab import SdpaSlab
    from hotstart.engine.block_manager import SlabManager
    from hotstart.engine.core import Engine
    from hotstart.engine.model_runner import ModelRunner
    from hotstart.engine.scheduler import Scheduler

    assert isinstance(dtype, torch.dtype)
    config = prepared.config
    specs = prepared.geometry.attention()
    reasons = SdpaSlab.refuse(specs)
    if reasons:
        raise ModelError("no attention back end can run this model: " + "; ".join(reasons))
    slabs = prepared.max_num_seqs + _DONOR_SLABS
    attention = SdpaSlab(specs, slabs, kv.max_model_len, dtype)
    blocks = SlabManager(
        slabs,
        kv.tokens,
        prefix_caching=config.cache.enable_prefix_caching and not prepared.geometry.rope_depends_on_length,
        free_pages=attention.release,
    )
    scheduler = Scheduler(
        blocks,
        max_num_seqs=prepared.max_num_seqs,
        max_num_batched_tokens=prepared.max_num_batched_tokens,
        chunked_prefill=config.scheduler.enable_chunked_prefill,
        long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
    )
    runner = ModelRunner(
        model,
        attention,
        torch.device("cpu"),
        rows=prepared.max_num_seqs,
        seed=config.model.seed,
        lengths=prepared.geometry.rope_depends_on_length,
    )
    return Engine(scheduler, runner, eos_ids=prepared.eos_ids, depth=1)
