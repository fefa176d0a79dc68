"""The settings of a server, one frozen struct per concern.

Every field is set by one row of the flag table (:mod:`hotstart.config.table`), under the field's
own name; defaults live here and nowhere else. The whole is sent to the engine as msgpack, see
:func:`encode` and :func:`decode`.

msgspec structs rather than dataclasses: both processes need msgspec anyway, and these nine classes
cost 1.5 ms to define, against 8 ms as dataclasses, which generate code for each.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import field


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how its files are read."""

    model: str
    """As given: a directory or a hub name."""
    path: str = ""
    """The directory it resolved to, absolute; of an object store, the one with its small files."""
    location: str = ""
    """Where the weights lie when that is no directory: ``s3://bucket/prefix`` and its relatives."""
    tokenizer: str | None = None
    served_model_name: tuple[str, ...] = ()
    revision: str | None = None
    tokenizer_revision: str | None = None
    hf_token: str | None = None
    dtype: str = "auto"
    """``auto`` (what is stored), ``float32``, ``float16`` or ``bfloat16``."""
    seed: int = 0
    max_model_len: int | None = None
    """None: the model's own; -1: the largest that fits."""
    hf_overrides: dict[str, Any] = {}
    generation_config: str = "auto"
    """``auto`` (from the model's directory), ``vllm`` (neutral defaults) or a directory."""
    override_generation_config: dict[str, Any] = {}
    download_dir: str | None = None
    ignore_index: bool = False
    tie_word_embeddings: bool | None = None
    """Overrides the configuration; None: as it says."""
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    default_chat_template_kwargs: dict[str, Any] = {}
    response_role: str = "assistant"
    max_logprobs: int = 20

    def __repr__(self) -> str:
        return _repr(self, secret="hf_token")


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How weights come into memory."""

    load_format: str = "auto"
    model_loader_extra_config: dict[str, Any] = {}
    read_strategy: str = "auto"
    """``auto``, ``map``, ``buffered`` or ``direct``."""
    expect_mount: str | None = None
    storage_timeout: float = 60.0
    """Seconds without a byte after which a read is given up."""
    disk_cache: str | None = None
    """``DIR`` or ``DIR:SIZE``: where copies of what an object store sends are kept."""
    verify: str = "size"
    """``off``, ``size`` (sizes and headers) or ``digest`` (SHA-256 of every weight file)."""

    def __repr__(self) -> str:
        return _repr(self, secret="model_loader_extra_config")  # it may hold keys of a store


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """KV cache."""

    gpu_memory_utilization: float = 0.92
    """Share of the device's memory (on CPU: of the cgroup's limit) that hotstart may use."""
    kv_cache_memory_bytes: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one step may hold."""

    max_num_seqs: int | None = None
    """None: 256, or ``max_num_batched_tokens`` where that is less."""
    max_num_batched_tokens: int | None = None
    """None: 2048 on CPU, 8192 on CUDA; or the context, where prompts may not be cut and it is more."""
    max_queued_requests: int = 1024
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


class OptimizationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Eager, fused, captured, compiled."""

    optimization_level: int = 2
    enforce_eager: bool = False
    compilation_config: dict[str, Any] = {}
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    max_cudagraph_capture_size: int | None = None


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where tensors live."""

    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    threads: int | None = None
    """Compute threads on CPU; None: one per usable core."""


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side."""

    host: str | None = None
    """None: all interfaces."""
    port: int = 8000
    uds: str | None = None
    api_key: tuple[str, ...] = ()
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    hold_requests: bool = True
    max_held_requests: int = 256
    shutdown_timeout: float = 30.0
    """Seconds that running requests get after SIGTERM."""
    stall_timeout: float = 60.0
    """Seconds without progress after which a start counts as stalled: /livez answers 503 then."""
    max_body_bytes: int = 32 * 2**20
    enable_request_id_headers: bool = False
    disable_fastapi_docs: bool = False
    enable_prompt_tokens_details: bool = False
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False

    def __repr__(self) -> str:
        return _repr(self, secret="api_key")


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is printed."""

    log_level: str = "info"
    log_format: str = "text"
    """``text`` or ``json``."""
    enable_log_requests: bool = False
    max_log_len: int | None = None
    disable_log_stats: bool = False
    uvicorn_log_level: str = "warning"
    disable_uvicorn_access_log: bool = False
    startup_json: str | None = None
    use_tqdm_on_load: bool = True


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, for both processes."""

    model: ModelConfig
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cache_root: str = ""
    """Absolute; empty: not resolved yet (see :func:`hotstart.config.cache_root.resolve`)."""


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "load": LoadConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "optimization": OptimizationConfig,
    "device": DeviceConfig,
    "http": HttpConfig,
    "log": LogConfig,
}
"""The fields of :class:`Config` that are structs themselves."""

_decoder = msgspec.msgpack.Decoder(Config)


def encode(config: Config) -> bytes:
    """The settings as msgpack, for the other process."""
    return msgspec.msgpack.encode(config)


def decode(data: bytes) -> Config:
    """The inverse of :func:`encode`."""
    return _decoder.decode(data)


def _repr(section: msgspec.Struct, *, secret: str) -> str:
    """As msgspec writes it, but a secret that is set stays out of logs and tracebacks."""
    shown = (
        f"{name}={'***' if name == secret and value else repr(value)}"
        for name, value in msgspec.structs.asdict(section).items()
    )
    return f"{type(section).__name__}({', '.join(shown)})"
