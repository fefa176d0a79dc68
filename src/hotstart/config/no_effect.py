"""The flags of vLLM's ``serve`` that are accepted with no effect, each with the reason.

None of them may change the answer, the bytes read, the devices, the memory or the security.
"""

from __future__ import annotations

from hotstart.config.flags import Group, no_effect
from hotstart.config.values import Choice, Json, Many, Number, Text, Whole

_TEXT = Text()
_COUNT = Whole(0)
_ONE = Whole(1)

_EAGER = "steps run eagerly in this version"
_READER = "the reader chooses by page-cache residency and measurement; see --read-strategy"
_ONE_RANK_ONLY = "it concerns several ranks, and this version runs one"
_STEPS = "steps run ahead of the device wherever there is one"
_BUDGET = "the token budget alone decides"
_TEXT_ONLY = "only text models are served"

NO_EFFECT_GROUP = Group(
    "Accepted with no effect",
    no_effect(
        "--optimization-level", "-O", kind=Whole(0, 3), to="optimization.optimization_level", because=_EAGER
    ),
    no_effect(
        "--compilation-config",
        "-cc",
        kind=Json(),
        to="optimization.compilation_config",
        because=_EAGER,
        dotted_names=("-O",),
    ),
    no_effect(
        "--cudagraph-capture-sizes",
        "--cuda-graph-sizes",
        kind=Many(_ONE),
        to="optimization.cudagraph_capture_sizes",
        because=_EAGER,
    ),
    no_effect(
        "--max-cudagraph-capture-size",
        kind=_COUNT,
        to="optimization.max_cudagraph_capture_size",
        because=_EAGER,
    ),
    no_effect("--max-seq-len-to-capture", kind=_ONE, because=_EAGER),
    no_effect("--cudagraph-metrics", because=_EAGER),
    no_effect("--enable-flashinfer-autotune", because="FlashInfer is not used"),
    no_effect("--safetensors-load-strategy", kind=Choice("lazy", "eager", "prefetch"), because=_READER),
    no_effect("--safetensors-prefetch-num-threads", kind=_ONE, because=_READER),
    no_effect("--safetensors-prefetch-block-size", kind=_TEXT, because=_READER),
    no_effect("--max-parallel-loading-workers", kind=_ONE, because=_READER),
    no_effect("--pt-load-map-location", kind=_TEXT, because="pickle files are never read"),
    no_effect("--async-scheduling", because=_STEPS),
    no_effect("--disable-async-output-proc", because=_STEPS),
    no_effect("--stream-interval", kind=_ONE, because="each token is sent as soon as it is there"),
    no_effect("--use-v2-block-manager", because="there is one block manager"),
    no_effect("--disable-hybrid-kv-cache-manager", because="there is one block manager"),
    no_effect("--num-scheduler-steps", kind=_ONE, because="there is one scheduler, a step at a time"),
    no_effect(
        "--scheduler-delay-factor", kind=Number(0), because="waiting requests are taken in at every step"
    ),
    no_effect(
        "--swap-space",
        kind=Number(0),
        because="preempted requests are computed again, not swapped, as in vLLM since its V1 engine",
    ),
    no_effect("--max-num-partial-prefills", kind=_ONE, because=_BUDGET),
    no_effect("--max-long-partial-prefills", kind=_ONE, because=_BUDGET),
    no_effect("--disable-cascade-attn", because="cascade attention is not used"),
    no_effect("--disable-custom-all-reduce", because=_ONE_RANK_ONLY),
    no_effect("--distributed-executor-backend", kind=Choice("mp", "uni"), because=_ONE_RANK_ONLY),
    no_effect("--disable-nccl-for-dp-synchronization", because=_ONE_RANK_ONLY),
    no_effect("--distributed-timeout-seconds", kind=_ONE, because=_ONE_RANK_ONLY),
    no_effect("--ray-workers-use-nsight", because=_ONE_RANK_ONLY),
    no_effect("--disable-frontend-multiprocessing", because="frontend and engine are always two processes"),
    no_effect("--disable-log-requests", because="requests are logged only with --enable-log-requests"),
    no_effect("--enable-log-outputs", because="answers are not logged"),
    no_effect("--enable-log-deltas", because="answers are not logged"),
    no_effect("--log-config-file", kind=_TEXT, because="see --log-format and --log-level"),
    no_effect("--enable-logging-iteration-details", because="see /metrics"),
    no_effect("--kv-cache-metrics", because="see /metrics"),
    no_effect("--enable-mfu-metrics", because="see /metrics"),
    no_effect("--show-hidden-metrics-for-version", kind=_TEXT, because="no metric is hidden"),
    no_effect(
        "--h11-max-incomplete-event-size",
        kind=_ONE,
        because="the HTTP parser is httptools; see --max-body-bytes",
    ),
    no_effect("--h11-max-header-count", kind=_ONE, because="the HTTP parser is httptools"),
    no_effect("--enable-offline-docs", because="the API description is served without outside assets"),
    no_effect("--enable-server-load-tracking", because="/load always counts the requests in flight"),
    no_effect("--tokenizer-pool-size", kind=_COUNT, because="the tokenizer runs in the frontend"),
    no_effect("--renderer-num-workers", kind=_ONE, because="the tokenizer runs in the frontend"),
    no_effect("--language-model-only", because=_TEXT_ONLY),
    no_effect("--skip-mm-profiling", because=_TEXT_ONLY),
    no_effect("--disable-mm-preprocessor-cache", because=_TEXT_ONLY),
    no_effect("--allow-deprecated-quantization", because="--quantization is refused"),
)
