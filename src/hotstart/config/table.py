"""The flags of ``serve`` and ``check``: everything hotstart does something with.

Defaults are those of :mod:`hotstart.config.settings`. The flags of vLLM that have no effect here,
and those that are refused, stand in modules of their own; together they are one table.
"""

from __future__ import annotations

from hotstart.config.command import Command
from hotstart.config.flags import Group, Positional, flag
from hotstart.config.load_formats import ACCEPTED, REFUSALS
from hotstart.config.no_effect import NO_EFFECT_GROUP
from hotstart.config.refused import REFUSED_GROUPS
from hotstart.config.values import Choice, Json, Many, Number, Size, Text, Whole

_WORD = Text("NAME")
_PATH = Text("PATH")
_LEVELS = Choice("debug", "info", "warning", "error", also={"warn": "warning", "critical": "error"})
_MOUNT = "mount it and pass the directory: `hotstart serve /mnt/model`"
_ONE_RANK = "this version runs one rank"

MODEL = Positional(
    "MODEL",
    to="model.model",
    names=("--model",),
    help="a directory (starts with /, . or ~), an address (s3://, gs://, az://, https://) or a name on "
    "the hub",
    only_one="Start one server for each model, each with its own --port: one server serves one model",
)

_MODEL_GROUP = Group(
    "Model",
    flag(
        "--served-model-name",
        to="model.served_model_name",
        kind=Many(_WORD),
        help="name or names in the API; default: MODEL as given",
    ),
    flag("--tokenizer", to="model.tokenizer", kind=_PATH, help="directory or hub name; default: the model's"),
    flag("--revision", to="model.revision", kind=_WORD, help="branch, tag or commit on the hub"),
    flag("--tokenizer-revision", to="model.tokenizer_revision", kind=_WORD, help="the same for --tokenizer"),
    flag(
        "--hf-token",
        to="model.hf_token",
        kind=Text("TOKEN"),
        secret=True,
        help="access token of the hub; better: the variable HF_TOKEN, which other users cannot see",
    ),
    flag("--download-dir", to="model.download_dir", kind=_PATH, help="where hub models are kept"),
    flag(
        "--dtype",
        to="model.dtype",
        kind=Choice("auto", "float32", "float16", "bfloat16", also={"half": "float16", "float": "float32"}),
        help="compute type; auto: as stored",
    ),
    flag(
        "--max-model-len",
        to="model.max_model_len",
        kind=Whole(2, words={"auto": -1, "-1": -1}, why="one token of a prompt and one of its answer"),
        help="longest prompt plus answer, in tokens; auto: the longest that fits; default: the model's own",
    ),
    flag(
        "--seed", to="model.seed", kind=Whole(0, 2**64 - 1), help="for requests without a seed of their own"
    ),
    flag(
        "--hf-overrides",
        to="model.hf_overrides",
        kind=Json(),
        help="keys of config.json to replace",
    ),
    flag(
        "--tie-word-embeddings",
        to="model.tie_word_embeddings",
        help="the output head is the embedding; default: as config.json says",
    ),
    flag(
        "--generation-config",
        to="model.generation_config",
        kind=_PATH,
        help="defaults of sampling: auto (the model's file), vllm (neutral) or a directory",
    ),
    flag(
        "--override-generation-config",
        to="model.override_generation_config",
        kind=Json(),
        help="single defaults of sampling to replace",
    ),
    flag(
        "--max-logprobs",
        to="model.max_logprobs",
        kind=Whole(-1),
        help="most top log probabilities a request may ask for; -1: no bound",
    ),
)

_LOADING_GROUP = Group(
    "Loading",
    flag(
        "--load-format",
        to="load.load_format",
        kind=Choice(*ACCEPTED, metavar="FORMAT"),
        help=f"who reads the weights: {', '.join(ACCEPTED)}; dummy: random weights, nothing is read",
        reasons={
            **{
                name: (f"{name} is a medium, not a format", _MOUNT) for name in ("nvme", "block", "s3", "nfs")
            },
            **REFUSALS,
        },
    ),
    flag(
        "--model-loader-extra-config",
        to="load.model_loader_extra_config",
        kind=Json(),
        help="tuning of the loader; a wrong key is an error that lists the right ones",
        secret=True,  # it may hold keys of a store
    ),
    flag(
        "--read-strategy",
        to="load.read_strategy",
        kind=Choice("auto", "map", "buffered", "direct"),
        help="how files are read; auto decides by page-cache residency and measurement; map on a CPU only",
    ),
    flag(
        "--expect-mount",
        to="load.expect_mount",
        kind=Text("PATH[:TYPE]"),
        help="refuse to start unless this directory is a mount point, not of the root disk, with the "
        "model below it; TYPE, such as nfs4: and of this file system",
    ),
    flag(
        "--storage-timeout",
        to="load.storage_timeout",
        kind=Number(0, above=True),
        help="seconds that storage may give no byte before it is asked again, then given up",
    ),
    flag(
        "--disk-cache",
        to="load.disk_cache",
        kind=Text("DIR[:SIZE]"),
        help="keep a copy of what an object store sends, for the next start; SIZE, such as 200GB, "
        "bounds all copies in DIR; default: none are kept",
    ),
    flag(
        "--verify",
        to="load.verify",
        kind=Choice("off", "size", "digest"),
        help="what weight files are compared with before the server is ready: their headers and sizes, or "
        "digests as well, of SHA256SUMS, NAME.sha256, the store or an earlier start; size: digests later, "
        "off: never",
    ),
    flag(
        "--ignore-index",
        to="model.ignore_index",
        help="take tensors from the files that are there, not from model.safetensors.index.json",
    ),
)

_MEMORY_GROUP = Group(
    "Memory and batch",
    flag(
        "--gpu-memory-utilization",
        to="cache.gpu_memory_utilization",
        kind=Number(0, 1, above=True),
        help="share of the device's memory (on CPU: of the memory limit) to use",
    ),
    flag(
        "--kv-cache-memory-bytes",
        to="cache.kv_cache_memory_bytes",
        kind=Size(),
        help="size of the KV cache; nothing is measured then; the log prints the value to pass",
    ),
    flag(
        "--block-size",
        to="cache.block_size",
        kind=Whole(1, 4096),
        help="tokens in a KV block; always 16 on the CPU",
    ),
    flag(
        "--num-gpu-blocks-override",
        to="cache.num_gpu_blocks_override",
        kind=Whole(1),
        help="number of KV blocks, in place of the computed one",
    ),
    flag(
        "--kv-cache-dtype",
        to="cache.kv_cache_dtype",
        kind=_WORD,
        only=("auto",),
        because="the cache holds keys and values in the compute type",
        instead="leave it out; a smaller --max-model-len or --max-num-seqs saves memory too",
        help="auto: the compute type",
    ),
    flag(
        "--enable-prefix-caching",
        to="cache.enable_prefix_caching",
        help="reuse the keys and values of equal beginnings",
    ),
    flag(
        "--max-num-seqs",
        to="scheduler.max_num_seqs",
        kind=Whole(1),
        help="requests in one step; default: 256, or the tokens of a step where they are fewer",
    ),
    flag(
        "--max-num-batched-tokens",
        to="scheduler.max_num_batched_tokens",
        kind=Whole(1),
        help="tokens in one step; default: 2048 on CPU, 8192 on CUDA; without chunked prefill, "
        "at least the longest prompt",
    ),
    flag(
        "--enable-chunked-prefill",
        to="scheduler.enable_chunked_prefill",
        help="cut long prompts into several steps; without it the longest must fit in one",
    ),
    flag(
        "--long-prefill-token-threshold",
        to="scheduler.long_prefill_token_threshold",
        kind=Whole(0),
        help="most tokens of one prompt in a step; 0: no bound of its own",
    ),
    flag(
        "--scheduling-policy",
        to="scheduler.scheduling_policy",
        kind=Choice("fcfs"),
        reasons={"priority": ("requests run in order of arrival", "leave it out")},
        help="order of waiting requests: fcfs, that of their arrival",
    ),
    flag(
        "--max-queued-requests",
        "--max-num-queued-reqs",
        to="scheduler.max_queued_requests",
        kind=Whole(1),
        help="waiting requests before new ones get 429",
    ),
)

_DEVICE_GROUP = Group(
    "Device and start",
    flag(
        "--device",
        to="device.device",
        kind=_WORD,
        help="auto, cpu, cuda or cuda:N; auto: the first visible GPU, else the CPU",
    ),
    flag(
        "--threads",
        to="device.threads",
        kind=Whole(1, 4096),
        help="compute threads on CPU; default: one a core",
    ),
    flag(
        "--tensor-parallel-size",
        "-tp",
        to="parallel.tensor_parallel_size",
        kind=Whole(1),
        only=(1,),
        because=_ONE_RANK,
        instead="leave it out",
        help="ranks that share each layer",
    ),
    flag(
        "--pipeline-parallel-size",
        "-pp",
        to="parallel.pipeline_parallel_size",
        kind=Whole(1),
        only=(1,),
        because=_ONE_RANK,
        instead="leave it out",
        help="ranks that hold consecutive layers",
    ),
    flag("--enforce-eager", to="optimization.enforce_eager", help="no graphs, no compilation"),
    flag(
        "--cache-root",
        to="cache_root",
        kind=_PATH,
        help="every cache; default: HOTSTART_CACHE_ROOT, VLLM_CACHE_ROOT/hotstart, ~/.cache/hotstart",
    ),
    flag(
        "--startup-json",
        to="log.startup_json",
        kind=_PATH,
        help="write the phases of the start to this file once ready",
    ),
    flag("--config", to="config", kind=_PATH, help="YAML file with flags as keys; the command line wins"),
)

_HTTP_GROUP = Group(
    "HTTP",
    flag("--host", to="http.host", kind=Text("ADDRESS"), help="address to listen on; default: all"),
    flag("--port", to="http.port", kind=Whole(0, 65535), help="0: any free port"),
    flag("--uds", to="http.uds", kind=_PATH, help="listen on a unix socket instead of a port"),
    flag(
        "--api-key",
        to="http.api_key",
        kind=Many(Text("KEY")),
        secret=True,
        help="keys that /v1 accepts; better: the variable HOTSTART_API_KEY (or VLLM_API_KEY)",
    ),
    flag(
        "--root-path",
        to="http.root_path",
        kind=Text("PATH", empty=True),
        help="prefix that a proxy in front strips",
    ),
    flag("--ssl-keyfile", to="http.ssl_keyfile", kind=_PATH, help="TLS: private key (PEM)"),
    flag("--ssl-certfile", to="http.ssl_certfile", kind=_PATH, help="TLS: certificate chain (PEM)"),
    flag(
        "--ssl-ca-certs", to="http.ssl_ca_certs", kind=_PATH, help="TLS: authorities for client certificates"
    ),
    flag(
        "--ssl-cert-reqs",
        to="http.ssl_cert_reqs",
        kind=Whole(0, 2),
        help="client certificate: 0 none, 1 optional, 2 required",
    ),
    flag("--allowed-origins", to="http.allowed_origins", kind=Many(Text("ORIGIN")), help="CORS: origins"),
    flag("--allowed-methods", to="http.allowed_methods", kind=Many(Text("METHOD")), help="CORS: methods"),
    flag("--allowed-headers", to="http.allowed_headers", kind=Many(Text("HEADER")), help="CORS: headers"),
    flag("--allow-credentials", to="http.allow_credentials", help="CORS: cookies and credentials"),
    flag(
        "--hold-requests",
        to="http.hold_requests",
        help="hold requests that arrive before the model is ready; off: 503 with Retry-After",
    ),
    flag("--max-held-requests", to="http.max_held_requests", kind=Whole(1), help="how many to hold"),
    flag(
        "--shutdown-timeout",
        to="http.shutdown_timeout",
        kind=Number(0),
        help="seconds that running requests get after SIGTERM",
    ),
    flag(
        "--stall-timeout",
        to="http.stall_timeout",
        kind=Number(0, above=True),
        help="seconds without any progress of the start before /livez answers 503; slow is no stall",
    ),
    flag("--max-body-bytes", to="http.max_body_bytes", kind=Size(), help="largest request body"),
    flag(
        "--enable-request-id-headers",
        to="http.enable_request_id_headers",
        help="answer with an X-Request-Id header",
    ),
    flag("--disable-fastapi-docs", to="http.disable_fastapi_docs", help="no /openapi.json"),
)

_CHAT_GROUP = Group(
    "Chat and answers",
    flag("--chat-template", to="model.chat_template", kind=_PATH, help="file, or the template itself"),
    flag(
        "--chat-template-content-format",
        to="model.chat_template_content_format",
        kind=Choice("auto", "string", "openai"),
        help="how message content reaches the template",
    ),
    flag(
        "--default-chat-template-kwargs",
        to="model.default_chat_template_kwargs",
        kind=Json(),
        help="arguments of the template that requests may override",
    ),
    flag("--response-role", to="model.response_role", kind=_WORD, help="role of the answer"),
    flag(
        "--enable-prompt-tokens-details",
        to="http.enable_prompt_tokens_details",
        help="usage says how many prompt tokens came from the prefix cache",
    ),
    flag(
        "--enable-force-include-usage",
        to="http.enable_force_include_usage",
        help="every stream ends with a usage chunk",
    ),
    flag(
        "--return-tokens-as-token-ids",
        to="http.return_tokens_as_token_ids",
        help="log probabilities name tokens as token_id:N",
    ),
)

_LOG_GROUP = Group(
    "Log",
    flag("--log-level", to="log.log_level", kind=_LEVELS, help="least severity to print"),
    flag("--log-format", to="log.log_format", kind=Choice("text", "json"), help="json: one object a line"),
    flag(
        "--use-tqdm-on-load",
        to="log.use_tqdm_on_load",
        help="progress while starting: a bar on a terminal, else a line every 5 s",
    ),
    flag("--enable-log-requests", to="log.enable_log_requests", help="one line for each request"),
    flag("--max-log-len", to="log.max_log_len", kind=Whole(0), help="most characters of a prompt in the log"),
    flag("--disable-log-stats", to="log.disable_log_stats", help="no line with throughput every 10 s"),
    flag(
        "--uvicorn-log-level",
        to="log.uvicorn_log_level",
        kind=Choice("critical", "error", "warning", "info", "debug", "trace"),
        help="least severity of the HTTP library's own lines; from info on, one for each HTTP request too",
    ),
    flag(
        "--disable-uvicorn-access-log",
        "--disable-access-log",
        to="log.disable_uvicorn_access_log",
        help="no line for each HTTP request, with --uvicorn-log-level info or lower",
    ),
)

GROUPS = (
    _MODEL_GROUP,
    _LOADING_GROUP,
    _MEMORY_GROUP,
    _DEVICE_GROUP,
    _HTTP_GROUP,
    _CHAT_GROUP,
    _LOG_GROUP,
    NO_EFFECT_GROUP,
    *REFUSED_GROUPS,
)

SERVE = Command(
    "serve",
    "Serve a model over an OpenAI-compatible HTTP API.",
    GROUPS,
    positional=MODEL,
    config_file="config",
)


def check_command() -> Command:
    """``check``: the flags of ``serve``, so that a command line can be checked as it stands."""
    return Command(
        "check",
        "Run the checks at the head of `serve` and report every problem; nothing is loaded.",
        (
            Group(
                "Report",
                flag(
                    "--explain",
                    to="explain",
                    help="how the weights would be read, why, and in how many seconds; reads a few megabytes",
                ),
            ),
            *GROUPS,
        ),
        positional=MODEL,
        config_file="config",
    )
