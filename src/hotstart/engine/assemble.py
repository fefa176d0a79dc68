"""From settings to a running engine, in the order of a start. The first half never touches torch.

:func:`prepare` reads headers and small files; :func:`build` needs torch, binds the model to the
weights and sizes the KV cache by arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from hotstart.checkpoint.base import Checkpoint, ModelFiles
from hotstart.checkpoint.files import load_model_files
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.config.settings import Config
from hotstart.device import host
from hotstart.device.choose import choose
from hotstart.engine.kv_size import KVSize, Need, activation_bytes, kv_size
from hotstart.engine.placement import Placement, Weights, place
from hotstart.loading.match import Matched, match
from hotstart.models.base import Family, Geometry
from hotstart.models.registry import family_for

if TYPE_CHECKING:
    from hotstart.engine.core import Engine

DEFAULT_MAX_NUM_SEQS = 256
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class Prepared(Struct, kw_only=True):
    """What is known of a model before torch is there."""

    config: Config
    files: ModelFiles
    family: Family
    geometry: Geometry
    checkpoint: Checkpoint
    matched: Matched
    placement: Placement

    @property
    def max_num_seqs(self) -> int:
        """Running requests at most."""
        return self.config.scheduler.max_num_seqs or DEFAULT_MAX_NUM_SEQS

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens per step at most."""
        return self.config.scheduler.max_num_batched_tokens or self.placement.default_batched_tokens

    @property
    def prefix_caching(self) -> bool:
        """Off where a key depends on the length of its prompt."""
        return self.config.cache.enable_prefix_caching and not self.geometry.rope_depends_on_length

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: those of generation_config.json and of config.json."""
        found: list[int] = []
        for source in (self.files.generation_config or {}, self.files.config):
            value = source.get("eos_token_id")
            found += [value] if isinstance(value, int) else value if isinstance(value, list) else []
        return tuple(dict.fromkeys(found))


class Built(Struct, kw_only=True):
    """A running engine and what there is to say about it."""

    engine: Engine
    kv: KVSize
    device: str
    block_size: int


def prepare(config: Config) -> Prepared:
    """Read and match everything but weights. Raises every kind of error a start can end with."""
    placement = place(choose(config.device.device))
    files = load_model_files(config.model.path, overrides=config.model.hf_overrides)
    family = family_for(files.config)
    geometry = family.geometry(files.config)
    checkpoint = open_checkpoint(config.model.path, ignore_index=config.model.ignore_index)
    matched = match(family.specs(geometry), checkpoint, config.model.dtype)
    return Prepared(
        config=config,
        files=files,
        family=family,
        geometry=geometry,
        checkpoint=checkpoint,
        matched=matched,
        placement=placement,
    )


def size_kv(prepared: Prepared) -> KVSize:
    """The KV cache that fits beside everything else. Raises DeviceError."""
    config, g, placement = prepared.config, prepared.geometry, prepared.placement
    size = _DTYPE_BYTES[prepared.matched.dtype]
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
        fixed=placement.fixed_bytes,
        kv_per_token=g.kv_bytes_per_token(size),
    )
    return kv_size(
        placement.memory(),
        need,
        utilization=config.cache.gpu_memory_utilization,
        requested=config.cache.kv_cache_memory_bytes,
        max_model_len=config.model.max_model_len,
        model_max_len=g.max_position_embeddings,
        block_size=placement.block_size(prepared),
    )


def build(prepared: Prepared, weights: Weights) -> Built:
    """Bind the model to its weights and make the engine around it. Imports torch."""
    import torch

    from hotstart.engine.core import Engine
    from hotstart.engine.model_runner import ModelRunner
    from hotstart.engine.scheduler import Scheduler

    config, placement = prepared.config, prepared.placement
    device = placement.device()
    described = str(placement.choice.info)
    if device.type == "cpu":
        threads = config.device.threads or host.cores().count
        torch.set_num_threads(threads)
        described = f"cpu, {threads} threads"
    kv = size_kv(prepared)
    model = prepared.family.build(
        prepared.geometry,
        weights.store(),
        dtype=getattr(torch, prepared.matched.dtype),
        device=device,
        max_positions=kv.max_model_len,
    )
    attention, blocks = placement.kv_cache(prepared, kv)
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
        device,
        rows=prepared.max_num_seqs,
        seed=config.model.seed,
        lengths=prepared.geometry.rope_depends_on_length,
    )
    engine = Engine(scheduler, runner, eos_ids=prepared.eos_ids, depth=placement.depth)
    return Built(engine=engine, kv=kv, device=described, block_size=placement.block_size(prepared))
