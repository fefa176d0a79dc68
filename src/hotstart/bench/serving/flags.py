"""The flags of ``bench serve``: vLLM's with its defaults, but for ``--seed``, each time another one."""

from __future__ import annotations

import math

from hotstart.bench.serving import datasets
from hotstart.bench.serving.arrivals import EXPONENTIAL, LINEAR
from hotstart.bench.serving.metrics import LIMITS, NAMES
from hotstart.config.command import Command
from hotstart.config.flags import Group, flag, no_effect, refused
from hotstart.config.values import Choice, Json, Kind, Many, Number, Text, Whole

VLLM, OPENAI, OPENAI_CHAT = "vllm", "openai", "openai-chat"
_OTHER_BACKENDS = (
    "openai-audio", "openai-responses", "openai-embeddings", "openai-embeddings-chat",
    "openai-embeddings-clip", "openai-embeddings-vlm2vec", "infinity-embeddings", "infinity-embeddings-clip",
    "vllm-pooling", "vllm-rerank", "tgi", "tensorrt-llm", "deepspeed-mii", "lmdeploy", "sglang",
    "scalellm", "llama.cpp",
)  # fmt: skip


class Unbounded(Number):
    """A number above 0, or ``inf``."""

    def __init__(self) -> None:
        super().__init__(0, above=True)
        self.expects += ", or inf"

    def parse(self, text: str) -> object:
        """The number."""
        return math.inf if text.lower() in ("inf", "infinity") else super().parse(text)


class Pair(Kind):
    """``KEY=VALUE``."""

    metavar = "KEY=VALUE"
    expects = "a name, =, and a value"

    def parse(self, text: str) -> object:
        """A tuple of both."""
        key, equals, value = text.partition("=")
        if not key.strip() or not equals:
            raise ValueError
        return key.strip(), value.strip()


class Limit(Kind):
    """``ttft:500``."""

    metavar = "NAME:MS"
    expects = f"a limit in milliseconds, such as ttft:500, for one of {', '.join(LIMITS)}"

    def parse(self, text: str) -> object:
        """A tuple of the name and the number."""
        name, _, value = text.partition(":")
        if name not in LIMITS:
            raise ValueError
        return name, Number(0).parse(value)


class Names(Kind):
    """Names of metrics, with commas between."""

    metavar = "NAME,…"
    expects = f"names with commas between them, of {', '.join(NAMES)}"

    def parse(self, text: str) -> object:
        """A tuple of the names."""
        names = tuple(name.strip() for name in text.split(","))
        if not set(names) <= set(NAMES):
            raise ValueError
        return names


class Percentages(Kind):
    """Percentiles, with commas between."""

    metavar = "P,…"
    expects = "percentiles from 0 to 100 with commas between them, such as 50,99.9"

    def parse(self, text: str) -> object:
        """A tuple of numbers."""
        return tuple(Number(0, 100).parse(part) for part in text.split(","))


_SERVER = Group(
    "Which server",
    flag(
        "--backend",
        to="backend",
        kind=Choice(
            VLLM, OPENAI, OPENAI_CHAT, *_OTHER_BACKENDS, metavar=f"{{{VLLM},{OPENAI},{OPENAI_CHAT}}}"
        ),
        default=OPENAI,
        only=(VLLM, OPENAI, OPENAI_CHAT),
        because="what is measured are streamed completions and chats of OpenAI's API",
        instead=f"most servers have one of them: --backend {OPENAI} or {OPENAI_CHAT}",
        help="completions (both names mean the same), or chat completions",
    ),
    flag("--base-url", to="base_url", kind=Text("URL"), help="of the server, in place of host and port"),
    flag("--host", to="host", kind=Text("HOST"), default="127.0.0.1", help="the server's"),
    flag("--port", to="port", kind=Whole(1, 65535), default=8000, help="the server's"),
    flag(
        "--endpoint",
        to="endpoint",
        kind=Text("PATH"),
        help="default: /v1/completions, and of openai-chat /v1/chat/completions",
    ),
    flag(
        "--model",
        to="model",
        kind=Text("NAME"),
        help="what the server serves, or its directory; default: the first of /v1/models",
    ),
    flag(
        "--served-model-name",
        to="served_model_name",
        kind=Text("NAME"),
        help="what requests call it, where --model is something else",
    ),
    flag(
        "--tokenizer",
        to="tokenizer",
        kind=Text("DIR"),
        help="of the model, directory or name on the hub; default: --model's, else the server's /tokenize",
    ),
    flag(
        "--header",
        to="header",
        kind=Many(Pair()),
        default=(),
        secret=True,
        help="sent with each request; OPENAI_API_KEY is sent by itself",
    ),
    flag("--insecure", to="insecure", default=False, help="take any certificate"),
    flag(
        "--ready-check-timeout-sec",
        to="ready_check_timeout_sec",
        kind=Whole(0),
        default=0,
        help="wait so long for the server, then send one request that must succeed; 0: neither",
    ),
)
_LOAD = Group(
    "How to send",
    flag(
        "--request-rate",
        to="request_rate",
        kind=Unbounded(),
        default=math.inf,
        help="requests a second, at times drawn by --burstiness; inf: all at once",
    ),
    flag(
        "--burstiness",
        to="burstiness",
        kind=Unbounded(),
        default=1.0,
        help="1: independent of each other (Poisson); less: in bursts; more: evenly",
    ),
    flag(
        "--max-concurrency",
        to="max_concurrency",
        kind=Whole(1),
        help="requests at once; others wait in the client, which its figures leave out",
    ),
    flag(
        "--ramp-up-strategy",
        to="ramp_up_strategy",
        kind=Choice(LINEAR, EXPONENTIAL),
        help="let the rate grow over the run",
    ),
    flag("--ramp-up-start-rps", to="ramp_up_start_rps", kind=Whole(1), help="the rate of its beginning"),
    flag("--ramp-up-end-rps", to="ramp_up_end_rps", kind=Whole(1), help="the rate of its end"),
    flag(
        "--num-warmups",
        to="num_warmups",
        kind=Whole(0),
        default=0,
        help="requests before those that count, of other prompts",
    ),
    flag(
        "--seed",
        to="seed",
        kind=Whole(0),
        help="of prompts and times; default: another one each time, so that no cache knows the prompts",
    ),
    flag("--disable-tqdm", to="disable_tqdm", default=False, help="no progress on a terminal"),
    flag("--request-id-prefix", to="request_id_prefix", kind=Text("TEXT"), help="of X-Request-Id"),
)
_ASKED = Group(
    "What to ask",
    flag(
        "--ignore-eos",
        to="ignore_eos",
        default=False,
        help="go on to the length that is asked for; always with random prompts",
    ),
    flag("--temperature", to="temperature", kind=Number(0), help="default: the server's"),
    flag("--top-p", to="top_p", kind=Number(0, 1, above=True), help="default: the server's"),
    flag("--top-k", to="top_k", kind=Whole(0, words={"-1": -1}), help="default: the server's"),
    flag("--min-p", to="min_p", kind=Number(0, 1), help="default: the server's"),
    flag("--frequency-penalty", to="frequency_penalty", kind=Number(-2, 2), help="default: the server's"),
    flag("--presence-penalty", to="presence_penalty", kind=Number(-2, 2), help="default: the server's"),
    flag(
        "--repetition-penalty",
        to="repetition_penalty",
        kind=Number(0, above=True),
        help="default: 1 in completions, the server's in chats",
    ),
    flag("--logprobs", to="logprobs", kind=Whole(0), help="of so many tokens at each place"),
    flag("--extra-body", to="extra_body", kind=Json(), default={}, help="further fields of each request"),
    flag(
        "--chat-template-kwargs",
        to="chat_template_kwargs",
        kind=Json(),
        help="for the chat template, where the dataset custom applies it",
    ),
)
SAMPLING = (
    "top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
_OUTPUT = Group(
    "Output",
    flag(
        "--percentile-metrics",
        to="percentile_metrics",
        kind=Names(),
        default=("ttft", "tpot", "itl"),
        help="what to print the distribution of",
    ),
    flag(
        "--metric-percentiles",
        to="metric_percentiles",
        kind=Percentages(),
        default=(99.0,),
        help="of each of them",
    ),
    flag(
        "--goodput",
        to="goodput",
        kind=Many(Limit()),
        default=(),
        help="count the requests that keep all these limits",
    ),
    flag("--save-result", to="save_result", default=False, help="write the figures, as JSON"),
    flag("--save-detailed", to="save_detailed", default=False, help="with those of every request"),
    flag("--append-result", to="append_result", default=False, help="to what the file holds, a line each"),
    flag("--result-dir", to="result_dir", kind=Text("DIR"), help="where to write; default: here"),
    flag(
        "--result-filename",
        to="result_filename",
        kind=Text("FILE"),
        help="default: made of label, rate, concurrency, model and date",
    ),
    flag(
        "--label", to="label", kind=Text("NAME"), help="of the result; default in its file's name: --backend"
    ),
    flag("--metadata", to="metadata", kind=Many(Pair()), default=(), help="kept in the result"),
    flag("--plot", to="plot", kind=Text("FILE"), help="draw it, as PNG (needs hotstart[plot])"),
)
_OTHER_DATASETS = (
    "--asr-max-audio-len-sec", "--asr-min-audio-len-sec", "--bfcl-categories", "--blazedit-max-distance",
    "--blazedit-min-distance", "--random-mm-base-items-per-request", "--random-mm-bucket-config",
    "--random-mm-limit-mm-per-prompt", "--random-mm-num-mm-items-range-ratio", "--speed-bench-category",
    "--speed-bench-dataset-subset", "--speed-bench-output-len", "--timed-trace-chunk-hash-size",
    "--timed-trace-label-hash-ids", "--timed-trace-label-input-length", "--timed-trace-label-output-length",
    "--timed-trace-label-timestamp", "--timed-trace-sec-multiplier",
)  # fmt: skip
_PICTURE = "--plot FILE.png draws TTFT, ITL and tokens a second"
_KNOWN = Group(
    "Known from vLLM",
    no_effect("--skip-tokenizer-init", because="a tokenizer is loaded only where something is to be counted"),
    refused(
        "--tokenizer-mode",
        kind=Choice("auto", "hf", "mistral", "deepseek_v32"),
        only=("auto", "hf"),
        because="tokenizers are read from tokenizer.json",
        instead="leave --tokenizer out: the server's own counts",
    ),
    refused("--use-beam-search", because="there is no beam search"),
    refused(
        "--profile",
        because="other servers profile otherwise, and it changes what is measured",
        instead="`curl -X POST URL/start_profile` before, and /stop_profile after",
    ),
    refused(
        "--probe-request-rate",
        kind=Number(0),
        only=(0.0,),
        because="probes would be part of the load",
        instead="run a second `hotstart bench serve` beside this one",
    ),
    refused("--lora-modules", kind=Many(Text()), because="one model is measured", instead="--model ADAPTER"),
    refused("--lora-assignment", kind=Text(), because="one model is measured"),
    refused("--self-timed", because="no dataset here has times of its own", instead="--request-rate"),
    no_effect("--custom-ensure-client-side-data", because="what a prompt holds is text"),
    *(
        refused(name, kind=Text(), because="that dataset is not here", instead="--dataset-name custom")
        for name in _OTHER_DATASETS
    ),
    refused("--no-reranker", because="answers are measured, no ranks"),
    refused("--plot-timeline", because="there is another picture", instead=_PICTURE),
    refused("--timeline-itl-thresholds", kind=Text(), because="there is another picture", instead=_PICTURE),
    refused("--plot-dataset-stats", because="there is another picture", instead=_PICTURE),
)
SERVE = Command(
    "bench serve",
    "Send many requests to a running server and measure what a client sees.",
    (_SERVER, *datasets.groups(), _LOAD, _ASKED, _OUTPUT, _KNOWN),
)
