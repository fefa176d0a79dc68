"""The flags of vLLM's ``serve`` that are refused, each with its reason and the way out.

What would change the answer, the bytes read, the devices, the memory or the security is refused:
a command that asks for it must not seem to work.
"""

from __future__ import annotations

from hotstart.config.flags import Group, refused
from hotstart.config.values import Json, Many, Number, Text, Whole

_TEXT = Text()
_JSON = Json()
_WORDS = Many(_TEXT)
_COUNT = Whole(0)
_ONE = Whole(1)

_ONE_RANK = "this version runs one rank on one machine"

_WORLD = Group(
    "Refused: more than one rank",
    refused(
        "--data-parallel-size",
        "-dp",
        kind=_ONE,
        only=(1,),
        because=_ONE_RANK,
        instead="start several servers behind a load balancer",
    ),
    refused(
        "--data-parallel-size-local",
        "-dpl",
        kind=_ONE,
        only=(1,),
        because=_ONE_RANK,
        instead="start several servers",
    ),
    refused(
        "--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr", kind=_TEXT, because=_ONE_RANK
    ),
    refused(
        "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp", kind=_TEXT, because=_ONE_RANK
    ),
    refused("--data-parallel-backend", "-dpb", kind=_TEXT, because=_ONE_RANK),
    refused("--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe", because=_ONE_RANK),
    refused("--enable-expert-parallel", "-ep", because=_ONE_RANK),
    refused("--enable-ep-weight-filter", because=_ONE_RANK),
    refused("--expert-placement-strategy", "--all2all-backend", kind=_TEXT, because=_ONE_RANK),
    refused("--enable-eplb", "--enable-elastic-ep", because=_ONE_RANK),
    refused("--eplb-config", kind=_JSON, because=_ONE_RANK),
    refused("--enable-dbo", because=_ONE_RANK),
    refused(
        "--ubatch-size",
        "--dbo-decode-token-threshold",
        "--dbo-prefill-token-threshold",
        kind=_TEXT,
        because=_ONE_RANK,
    ),
    refused(
        "--decode-context-parallel-size",
        "-dcp",
        kind=_ONE,
        only=(1,),
        because=_ONE_RANK,
        instead="leave it out",
    ),
    refused(
        "--prefill-context-parallel-size",
        "-pcp",
        kind=_ONE,
        only=(1,),
        because=_ONE_RANK,
        instead="leave it out",
    ),
    refused("--cp-kv-cache-interleave-size", "--dcp-kv-cache-interleave-size", kind=_TEXT, because=_ONE_RANK),
    refused("--nnodes", "-n", kind=_ONE, only=(1,), because=_ONE_RANK, instead="leave it out"),
    refused("--node-rank", "-r", kind=_COUNT, only=(0,), because=_ONE_RANK, instead="leave it out"),
    refused("--master-addr", "--master-port", kind=_TEXT, because=_ONE_RANK),
    refused("--headless", because=_ONE_RANK),
    refused(
        "--api-server-count",
        "-asc",
        kind=_ONE,
        only=(1,),
        because="one frontend serves the engine",
        instead="leave it out",
    ),
    refused("--numa-bind", because="processes are not pinned", instead="start hotstart under numactl"),
    refused(
        "--numa-bind-nodes",
        "--numa-bind-cpus",
        kind=_WORDS,
        because="processes are not pinned",
        instead="start hotstart under numactl",
    ),
)

_QUANTIZATION = "quantized weights are not supported"
_STORED = "pass a checkpoint in bfloat16, float16 or float32"
_WEIGHTS = Group(
    "Refused: weights and model code",
    refused("--quantization", "-q", kind=_TEXT, because=_QUANTIZATION, instead=_STORED),
    refused("--quantization-config", kind=_JSON, because=_QUANTIZATION, instead=_STORED),
    refused("--calculate-kv-scales", because="the KV cache is not quantized"),
    refused("--kv-cache-dtype-skip-layers", kind=_WORDS, because="the KV cache is not quantized"),
    refused(
        "--model-impl",
        kind=_TEXT,
        only=("auto",),
        because="models run on hotstart's own definitions",
        instead="leave it out",
    ),
    refused(
        "--config-format", kind=_TEXT, only=("auto", "hf"), because="models are described by config.json"
    ),
    refused(
        "--hf-config-path",
        kind=_TEXT,
        because="config.json is read from the model's directory",
        instead="use --hf-overrides",
    ),
    refused(
        "--code-revision",
        kind=_TEXT,
        because="no model code is fetched",
        instead="pin the whole model with --revision",
    ),
    refused(
        "--tokenizer-mode",
        kind=_TEXT,
        only=("auto", "hf"),
        because="the tokenizer is read from the model's own files",
        instead="leave it out",
    ),
    refused("--skip-tokenizer-init", because="the API needs a tokenizer"),
    refused(
        "--ignore-patterns",
        kind=_WORDS,
        only=(("original/**/*",),),
        because="only the files that the index names are read",
        instead="leave it out",
    ),
    refused(
        "--model-weights",
        kind=_TEXT,
        because="weights are read from MODEL",
        instead="pass the directory as MODEL",
    ),
    refused(
        "--rope-scaling",
        kind=_JSON,
        because="it has become part of the overrides",
        instead="use --hf-overrides '{\"rope_scaling\": …}'",
    ),
    refused(
        "--rope-theta",
        kind=_TEXT,
        because="it has become part of the overrides",
        instead="use --hf-overrides.rope_theta N",
    ),
    refused(
        "--disable-sliding-window",
        because="it changes the answer of models with a window",
        instead="use --max-model-len to stay inside the window",
    ),
    refused(
        "--override-attention-dtype",
        kind=_TEXT,
        because="attention runs in the compute type",
        instead="use --dtype",
    ),
    refused(
        "--weight-transfer-config",
        kind=_JSON,
        because="weights cannot be replaced while serving",
        instead="restart with the new weights",
    ),
    refused("--enable-return-routed-experts", because="routing is not recorded"),
)

_BACKENDS = Group(
    "Refused: kernels and processes",
    refused(
        "--attention-backend",
        kind=_TEXT,
        only=("auto",),
        because="hotstart has attention back ends of its own and chooses by device",
        instead="leave it out",
    ),
    refused(
        "--attention-config", "-ac", kind=_JSON, because="hotstart chooses the attention back end by device"
    ),
    refused(
        "--moe-backend",
        "--linear-backend",
        kind=_TEXT,
        only=("auto",),
        because="kernels are chosen by device",
        instead="leave it out",
    ),
    refused(
        "--kernel-config",
        "--additional-config",
        kind=_JSON,
        because="it configures parts that hotstart does not have",
    ),
    refused(
        "--prefix-caching-hash-algo",
        kind=_TEXT,
        because="the hash of the prefix cache is fixed",
        instead="leave it out, or use --no-enable-prefix-caching",
    ),
    refused(
        "--enable-sleep-mode",
        because="the engine cannot give its memory back while it runs",
        instead="stop the server: it starts again fast",
    ),
    refused(
        "--worker-cls",
        "--worker-extension-cls",
        "--scheduler-cls",
        kind=_TEXT,
        because="foreign classes cannot be loaded into the engine",
    ),
    refused("--logits-processors", kind=_WORDS, because="foreign code cannot be loaded into the engine"),
    refused(
        "--logits-processor-pattern", kind=_TEXT, because="foreign code cannot be loaded into the engine"
    ),
    refused("--io-processor-plugin", kind=_TEXT, because="plugins cannot be loaded"),
    refused(
        "--middleware",
        kind=_TEXT,
        because="foreign code cannot be loaded into the frontend",
        instead="put a proxy in front",
    ),
    refused("--profiler-config", kind=_JSON, because="there is no profiler endpoint"),
    refused(
        "--otlp-traces-endpoint",
        kind=_TEXT,
        because="traces are not exported",
        instead="see /metrics and --startup-json",
    ),
    refused(
        "--collect-detailed-traces", kind=_WORDS, because="traces are not exported", instead="see /metrics"
    ),
)

_OFFLOAD = "weights and KV cache stay on the device"
_MEMORY = Group(
    "Refused: memory, offload and transfer",
    refused("--cpu-offload-gb", kind=Number(0), only=(0.0,), because=_OFFLOAD, instead="leave it out"),
    refused("--cpu-offload-params", kind=_WORDS, because=_OFFLOAD),
    refused(
        "--offload-backend",
        "--offload-group-size",
        "--offload-num-in-group",
        "--offload-prefetch-step",
        kind=_TEXT,
        because=_OFFLOAD,
    ),
    refused("--kv-offloading-size", kind=Number(0), only=(0.0,), because=_OFFLOAD, instead="leave it out"),
    refused("--kv-offloading-backend", kind=_TEXT, because=_OFFLOAD),
    refused(
        "--kv-transfer-config",
        "--ec-transfer-config",
        kind=_JSON,
        because="KV blocks are not sent to other servers",
    ),
    refused("--kv-events-config", kind=_JSON, because="KV events are not published"),
    refused("--kv-sharing-fast-prefill", because="models with shared KV layers are not supported"),
    refused("--watermark", kind=_TEXT, because="the scheduler keeps no blocks back"),
    refused(
        "--mamba-cache-dtype",
        "--mamba-ssm-cache-dtype",
        "--mamba-cache-mode",
        "--mamba-backend",
        kind=_TEXT,
        because="Mamba layers are not supported",
    ),
    refused("--mamba-block-size", kind=_TEXT, because="Mamba layers are not supported"),
)

_LORA = "LoRA adapters are not supported"
_MERGE = "merge the adapter into the weights and serve the result"
_MEDIA = "only text models are served"
_SPEC = "speculative decoding is not supported"
_TOOLS = "tool calls are not parsed"
_REASONING = "reasoning is not separated from the answer"
_FEATURES = Group(
    "Refused: features",
    refused(
        "--enable-lora",
        "--enable-lora-bias",
        "--fully-sharded-loras",
        "--enable-tower-connector-lora",
        because=_LORA,
        instead=_MERGE,
    ),
    refused("--lora-modules", kind=_WORDS, because=_LORA, instead=_MERGE),
    refused("--default-mm-loras", kind=_JSON, because=_LORA, instead=_MERGE),
    refused(
        "--max-loras",
        "--max-lora-rank",
        "--lora-dtype",
        "--max-cpu-loras",
        "--lora-extra-vocab-size",
        "--lora-target-modules",
        kind=_TEXT,
        because=_LORA,
        instead=_MERGE,
    ),
    refused("--enable-prompt-adapter", because="prompt adapters are not supported"),
    refused(
        "--limit-mm-per-prompt", "--mm-processor-kwargs", "--media-io-kwargs", kind=_JSON, because=_MEDIA
    ),
    refused("--mm-processor-cache-gb", kind=Number(0), only=(0.0,), because=_MEDIA),
    refused(
        "--mm-processor-cache-type",
        "--mm-shm-cache-max-object-size-mb",
        "--mm-encoder-tp-mode",
        "--mm-encoder-attn-backend",
        "--video-pruning-rate",
        kind=_TEXT,
        because=_MEDIA,
    ),
    refused("--interleave-mm-strings", "--enable-mm-embeds", "--mm-encoder-only", because=_MEDIA),
    refused("--allowed-local-media-path", kind=_TEXT, because=_MEDIA),
    refused("--allowed-media-domains", kind=_WORDS, because=_MEDIA),
    refused("--speculative-config", "-sc", kind=_JSON, because=_SPEC),
    refused(
        "--speculative-model", "--num-speculative-tokens", "--num-lookahead-slots", kind=_TEXT, because=_SPEC
    ),
    refused("--structured-outputs-config", kind=_JSON, because="output is not constrained by grammars"),
    refused("--guided-decoding-backend", kind=_TEXT, because="output is not constrained by grammars"),
    refused(
        "--enable-auto-tool-choice",
        "--exclude-tools-when-tool-choice-none",
        because=_TOOLS,
        instead="parse the answer in the client",
    ),
    refused(
        "--tool-call-parser",
        "--tool-parser-plugin",
        "--tool-server",
        kind=_TEXT,
        because=_TOOLS,
        instead="parse the answer in the client",
    ),
    refused(
        "--reasoning-parser",
        "--reasoning-parser-plugin",
        kind=_TEXT,
        because=_REASONING,
        instead="split the answer in the client",
    ),
    refused("--reasoning-config", kind=_JSON, because=_REASONING),
    refused("--runner", kind=_TEXT, only=("auto", "generate"), because="only text generation is served"),
    refused("--convert", kind=_TEXT, only=("auto", "none"), because="only text generation is served"),
    refused("--task", kind=_TEXT, only=("auto", "generate"), because="only text generation is served"),
    refused(
        "--pooler-config", "--override-pooler-config", kind=_JSON, because="only text generation is served"
    ),
    refused("--enable-prompt-embeds", because="prompts are text or token ids"),
    refused(
        "--logprobs-mode",
        kind=_TEXT,
        only=("raw_logprobs",),
        because="log probabilities are those before temperature and penalties",
        instead="leave it out",
    ),
)

_SECURITY = Group(
    "Refused: HTTP and security",
    refused(
        "--trust-remote-code",
        because="no Python code of a model's directory is ever run",
        instead="leave it out: the supported architectures need none",
    ),
    refused("--trust-request-chat-template", because="templates from requests are not run"),
    refused(
        "--enable-ssl-refresh",
        because="certificates are read once",
        instead="restart, or put a proxy in front",
    ),
    refused(
        "--ssl-ciphers",
        kind=_TEXT,
        because="the ciphers are those of the TLS library",
        instead="put a proxy in front",
    ),
    refused("--enable-tokenizer-info-endpoint", because="there is no such endpoint"),
    refused("--tokens-only", because="the API speaks text and token ids"),
    refused("--grpc", because="the API is HTTP"),
)

REFUSED_GROUPS = (_WORLD, _WEIGHTS, _BACKENDS, _MEMORY, _FEATURES, _SECURITY)
