"""From settings to a running engine, in the order of a start. The first half never touches torch.

:func:`prepare` reads headers and small files; :func:`build` needs torch, binds the model to the
weights and sizes the KV cache by arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, structs

from hotstart.checkpoint.base import Checkpoint, ModelFiles
from hotstart.checkpoint.files import load_model_files, overrides_of
from hotstart.checkpoint.folder import open_folder, shown_folder
from hotstart.checkpoint.wording import count
from hotstart.config.settings import Config
from hotstart.device import host
from hotstart.device.choose import choose
from hotstart.engine.kv_size import KVSize, Need, SizeFlag, kv_size
from hotstart.engine.placement import Placement, Weights, place
from hotstart.engine.step_memory import StepShape
from hotstart.errors import ConfigError, DeviceError, ModelError
from hotstart.loading.by_format import match_weights, open_weights
from hotstart.loading.loader_check import check_loader
from hotstart.loading.match import Matched
from hotstart.models.base import Family, Geometry, Model
from hotstart.models.registry import family_for
from hotstart.models.spec import WeightSpec
from hotstart.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotstart.engine.core import Engine
    from hotstart.loading.afterwards import Afterwards

DEFAULT_MAX_NUM_SEQS = 256
_FEWEST_TOKENS = 64
"""Of a step; with fewer a prompt takes longer than anybody waits."""
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
        """Running requests at most; by default never more than a step has tokens."""
        return self.config.scheduler.max_num_seqs or min(DEFAULT_MAX_NUM_SEQS, self.max_num_batched_tokens)

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens per step at most; by default enough for one of each request, and for a whole prompt."""
        scheduler, longest = self.config.scheduler, self.config.model.max_model_len
        if scheduler.max_num_batched_tokens is not None:
            return scheduler.max_num_batched_tokens
        wanted = max(self.placement.default_batched_tokens, scheduler.max_num_seqs or 0)
        if scheduler.enable_chunked_prefill:
            return wanted
        context = self.geometry.max_position_embeddings
        return max(wanted, context if longest in (None, -1) else longest)

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
        return tuple(dict.fromkeys(token for token in found if token >= 0))  # some files write -1 for none


class Built(Struct, kw_only=True):
    """A running engine and what there is to say about it."""

    engine: Engine
    kv: KVSize
    device: str
    block_size: int
    model: Model
    weights: Weights

    def tune(self) -> Iterator[None]:
        """The model's own tuning, and the memory that it frees; a few milliseconds a piece."""
        for slot in self.model.tune(self.weights.may_copy):
            self.weights.release(slot)
            yield


def prepare(config: Config, found: Callable[[], bytes | None] | None = None) -> Prepared:
    """Read and match everything but weights. Raises every kind of error a start can end with.

    ``found`` is asked for the checkpoint that another process has read the headers of, as
    :mod:`hotstart.checkpoint.passing` has it; None, or its answer None: they are read here.
    """
    check_loader(config)
    placement = place(choose(config.device.device))
    model = config.model
    files = load_model_files(model.path, shown=shown_folder(model), overrides=overrides_of(model))
    family = family_for(files.config)
    geometry = family.geometry(files.config)
    specs = family.specs(geometry)
    if config.load.load_format == "dummy":
        checkpoint, matched = Checkpoint(config.model.path, (), {}), without_files(specs, config, files)
    else:
        if found is not None:
            placement.attach()  # while the other process reads
        checkpoint = _checkpoint(config, found)
        matched = match_weights(specs, checkpoint, config)
    return Prepared(
        config=config,
        files=files,
        family=family,
        geometry=geometry,
        checkpoint=checkpoint,
        matched=matched,
        placement=placement,
    )


def _checkpoint(config: Config, found: Callable[[], bytes | None] | None) -> Checkpoint:
    folder = open_folder(config.model, config.load)
    if found is not None:
        if config.model.location:
            from hotstart.checkpoint.remote import ObjectFolder

            assert isinstance(folder, ObjectFolder)
            folder.warm_up()
        if (passed := found()) is not None:
            from hotstart.checkpoint import passing

            return passing.decode(passed, folder)
    return open_weights(folder, config)


def follow_up(prepared: Prepared, say: Callable[[int, str], None]) -> Afterwards | None:
    """What compares a load and prepares the next one; None: nobody asked for it.

    ``say`` takes a level of :mod:`logging` and a line. Raises StorageError.
    """
    load = prepared.config.load
    if load.load_format == "dummy" or (load.verify == "off" and load.disk_cache is None):
        return None
    from hotstart.loading.afterwards import Afterwards

    return Afterwards(prepared.checkpoint, load, prepared.config.cache_root, say)


def without_files(specs: list[WeightSpec], config: Config, files: ModelFiles) -> Matched:
    """What matching would find if the files were there: for random weights."""
    named = config.model.dtype
    if named == "auto":
        named = str(files.config.get("dtype") or files.config.get("torch_dtype") or "bfloat16")
    if named not in _DTYPE_BYTES:
        raise ModelError(f"config.json names dtype {named}", expected="one of " + ", ".join(_DTYPE_BYTES))
    size = sum(spec.elements for spec in specs if not spec.alias_of) * _DTYPE_BYTES[named]
    return Matched((), tuple(spec for spec in specs if spec.alias_of), named, {named: size})


def size_kv(prepared: Prepared) -> KVSize:
    """The KV cache that fits beside everything else. Raises DeviceError and ConfigError."""
    config, g, placement = prepared.config, prepared.geometry, prepared.placement
    _check_context(config.model.max_model_len, g.max_position_embeddings)
    footprint = placement.footprint(prepared)
    need = Need(
        weights=footprint.held,
        activations=step_shape(prepared).bytes,
        fixed=placement.fixed_bytes,
        kv_per_token=g.kv_bytes_per_token(_DTYPE_BYTES[prepared.matched.dtype]),
        loading=footprint.peak,
    )
    block_size = placement.block_size(prepared)
    requested, given_by = config.cache.kv_cache_memory_bytes, SizeFlag()
    if config.cache.num_gpu_blocks_override is not None:
        given_by = SizeFlag("--num-gpu-blocks-override", block_size * need.kv_per_token)
        requested = config.cache.num_gpu_blocks_override * given_by.unit
    kv = kv_size(
        placement.memory(),
        need,
        utilization=config.cache.gpu_memory_utilization,
        requested=requested,
        max_model_len=config.model.max_model_len,
        model_max_len=g.max_position_embeddings,
        block_size=block_size,
        given_by=given_by,
        smaller_step=lambda room: smaller_step(prepared, room),
    )
    _check_step(prepared, kv.max_model_len)
    return kv


def step_shape(prepared: Prepared) -> StepShape:
    """The largest step that the settings allow."""
    g, asked = prepared.geometry, prepared.config.model.max_model_len
    return StepShape(
        tokens=prepared.max_num_batched_tokens,
        seqs=prepared.max_num_seqs,
        context=g.max_position_embeddings if asked is None or asked == -1 else asked,
        hidden=g.hidden_size,
        intermediate=g.intermediate_size,
        q=g.heads * g.head_dim,
        kv=g.kv_heads * g.head_dim,
        vocab=g.vocab_size,
        dtype_bytes=_DTYPE_BYTES[prepared.matched.dtype],
        gathers=prepared.placement.gathers,
    )


def smaller_step(prepared: Prepared, room: int) -> list[str]:
    """How a step would take at most ``room`` bytes: one flag, either of two, or both together."""
    scheduler = prepared.config.scheduler
    tokens, seqs = prepared.max_num_batched_tokens, prepared.max_num_seqs
    fewest = min(tokens, _FEWEST_TOKENS)
    if not scheduler.enable_chunked_prefill:
        fewest = min(tokens, step_shape(prepared).context)

    def fits(**changed: int) -> bool:
        replaced = structs.replace(prepared.config, scheduler=structs.replace(scheduler, **changed))
        return step_shape(structs.replace(prepared, config=replaced)).bytes <= room

    def of_tokens(least: int, **others: int) -> int | None:
        return _largest(least, tokens, lambda value: fits(max_num_batched_tokens=value, **others))

    ways = []
    if few := _largest(1, seqs, lambda value: fits(max_num_seqs=value)):
        ways.append(f"lower --max-num-seqs to at most {few}")
    if few := of_tokens(max(fewest, scheduler.max_num_seqs or 1)):
        ways.append(f"lower --max-num-batched-tokens to at most {few}")
    usual = min(seqs, DEFAULT_MAX_NUM_SEQS)
    if not ways and (few := of_tokens(max(fewest, usual), max_num_seqs=usual)):
        ways.append(f"lower --max-num-seqs to {usual} and --max-num-batched-tokens to at most {few}")
    return ways


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest value below ``high`` that fits, by bisection; None: not even ``low``."""
    if low >= high or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check_step(prepared: Prepared, context: int) -> None:
    """A prompt that may not be cut, and fits no step, would wait forever."""
    tokens = prepared.max_num_batched_tokens
    if not prepared.config.scheduler.enable_chunked_prefill and tokens < context:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is less than the context of {context} tokens, "
            "and --no-enable-chunked-prefill forbids cutting a prompt",
            expected="room for the longest prompt in one step",
            advice=f"Pass --max-num-batched-tokens {context}, or --max-model-len {tokens}, "
            "or leave --no-enable-chunked-prefill out",
        )


def _check_context(asked: int | None, longest: int) -> None:
    """Beyond what the model was made for it answers nonsense, which nobody should get unasked."""
    if asked is not None and asked > longest:
        raise ConfigError(
            f"--max-model-len {asked} is longer than the model's context of {longest} tokens",
            expected=f"at most {longest}, or auto",
            advice="If the model was trained for more than its config.json says, pass "
            f"--hf-overrides '{{\"max_position_embeddings\": {asked}}}'",
        )


def build(prepared: Prepared, weights: Weights) -> Built:
    """Bind the model to its weights and make the engine around it. Imports torch.

    Raises the errors of :func:`size_kv`, what the readers raise where weights are converted, and
    DeviceError when the device has less memory than was free before.
    """
    import torch

    kv = size_kv(prepared)
    try:
        return _build(prepared, weights, kv)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{prepared.placement.memory().name} ran out of memory while the engine was built: "
            f"{str(error).partition('.')[0]} (KV cache {format_size(kv.bytes)}; {kv.arithmetic})",
            advice="If other programs use the device, end them or pass a smaller --kv-cache-memory-bytes; "
            "otherwise lower --gpu-memory-utilization",
        ) from error


def _build(prepared: Prepared, weights: Weights, kv: KVSize) -> Built:
    import torch

    from hotstart.engine.core import Engine
    from hotstart.engine.model_runner import ModelRunner
    from hotstart.engine.scheduler import Scheduler

    config, placement = prepared.config, prepared.placement
    device = placement.device()
    described = str(placement.choice.info)
    if device.type == "cpu":
        threads = config.device.threads or host.cores()
        torch.set_num_threads(threads)
        described = f"cpu, {count(threads, 'thread')}"
    model = prepared.family.build(
        prepared.geometry,
        weights.store(),
        dtype=getattr(torch, prepared.matched.dtype),
        device=device,
        max_positions=kv.max_model_len,
    )
    weights.settle()
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
    return Built(
        engine=engine,
        kv=kv,
        device=described,
        block_size=placement.block_size(prepared),
        model=model,
        weights=weights,
    )
