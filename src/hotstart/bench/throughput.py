"""``hotstart bench throughput``: how many requests and tokens a second, all given at once, without a server.

Flags, printed lines and JSON keys are those of ``vllm bench throughput``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hotstart.bench import in_process
from hotstart.bench.output import check_outputs
from hotstart.bench.serving.datasets_files import read_sharegpt
from hotstart.bench.throughput_prompts import RANDOM, SHAREGPT, requests_of
from hotstart.config.flags import Group, flag, no_effect, refused
from hotstart.config.values import Choice, Number, Text, Whole
from hotstart.errors import ConfigError

if TYPE_CHECKING:
    from hotstart.bench.serving.requests import SampleRequest
    from hotstart.llm import LLM, RequestOutput

_CACHED_WORTH_SAYING = 0.01
"""Share of the prompt tokens that were not computed, from which on it is said."""

THROUGHPUT = in_process.command(
    "bench throughput",
    "Measure requests and tokens a second in this process, with all requests given at once.",
    Group(
        "What to run",
        flag(
            "--dataset-name",
            to="dataset_name",
            kind=Choice(SHAREGPT, RANDOM),
            default=SHAREGPT,
            help="conversations of --dataset-path, or random tokens; without a path always random",
        ),
        flag("--dataset-path", to="dataset_path", kind=Text("FILE"), help="conversations in ShareGPT's JSON"),
        flag("--num-prompts", to="num_prompts", kind=Whole(1), default=1000, help="requests"),
        flag(
            "--num-warmups",
            to="num_warmups",
            kind=Whole(0),
            default=0,
            help="requests before those that count",
        ),
        flag("--input-len", to="input_len", kind=Whole(1), help="tokens of each random prompt"),
        flag(
            "--output-len",
            to="output_len",
            kind=Whole(1),
            help="tokens of each answer; default: as the dataset has it, 128 with random tokens",
        ),
        flag("--n", to="n", kind=Whole(1, 128), default=1, help="answers to each prompt"),
        flag("--random-input-len", to="random_input_len", kind=Whole(1), help="as --input-len"),
        flag("--random-output-len", to="random_output_len", kind=Whole(1), help="as --output-len"),
        flag(
            "--random-prefix-len",
            "--prefix-len",
            to="prefix_len",
            kind=Whole(0),
            default=0,
            help="tokens in front of every random prompt that are the same in all",
        ),
        flag(
            "--random-range-ratio",
            to="range_ratio",
            kind=Number(0, 0.999),
            default=0.0,
            help="0.2: random lengths from 0.8 to 1.2 of what is asked",
        ),
        flag(
            "--no-oversample",
            to="no_oversample",
            help="do not repeat conversations where there are fewer than --num-prompts",
        ),
        flag("--output-json", to="output_json", kind=Text("FILE"), help="write the figures"),
    ),
    Group(
        "Of one engine only",
        flag(
            "--backend",
            to="backend",
            kind=Choice("vllm", "hf", "mii", "vllm-chat"),
            default="vllm",
            only=("vllm",),
            because="hotstart's Python API is what is measured",
            help="vllm is this engine, so that command lines can be kept",
        ),
        no_effect("--async-engine", because="there is one engine, which steps in this thread"),
        no_effect("--prequeue-requests", because="all requests are queued before the first step in any case"),
        refused("--lora-path", kind=Text("PATH"), because="there are no LoRA adapters"),
    ),
)


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ``HotstartError``."""
    values, engine = in_process.parse(THROUGHPUT, argv)
    check_outputs({"--output-json": values.get("output_json")})
    conversations = _conversations(values)
    llm = in_process.load(engine)
    seed = engine.get("model.seed", 0)
    warmups = []
    if values["num_warmups"]:
        warmups = requests_of(llm, {**values, "num_prompts": values["num_warmups"]}, conversations, seed + 1)
    requests = requests_of(llm, values, conversations, seed)
    for request in (*warmups, *requests):
        in_process.check_fits(
            llm, request.prompt_len, request.expected_output_len, "--input-len or --output-len"
        )
    if warmups:
        print(f"Warming up with {len(warmups)} requests...", flush=True)
        _generate(llm, warmups, values["n"])
    asked = sum(request.prompt_len for request in requests)
    print(f"{len(requests)} requests with {asked} prompt tokens are running", file=sys.stderr)
    begin = time.perf_counter()
    outputs = _generate(llm, requests, values["n"])
    _report(engine["model.model"], time.perf_counter() - begin, outputs, values.get("output_json"))
    return 0


def _conversations(values: dict[str, Any]) -> list[tuple[str, str]]:
    """What --dataset-path holds; empty where the prompts are random."""
    path = values.get("dataset_path")
    if path and values["dataset_name"] == SHAREGPT:
        return read_sharegpt(path)
    if values["dataset_name"] == SHAREGPT:
        print("When dataset path is not set, it will default to random dataset", flush=True)
    if not values.get("random_input_len") and not values.get("input_len"):
        raise ConfigError(
            "there is no length for random prompts",
            advice="Give --input-len, or a file of conversations: --dataset-path FILE",
        )
    values["dataset_name"] = RANDOM
    return []


def _generate(llm: LLM, requests: Sequence[SampleRequest], n: int) -> list[RequestOutput]:
    from hotstart.messages import SamplingParams

    return llm.generate(
        [request.prompt for request in requests],
        [
            SamplingParams(n=n, ignore_eos=True, max_tokens=request.expected_output_len)
            for request in requests
        ],
    )


def _report(model: str, seconds: float, outputs: Sequence[RequestOutput], path: str | None) -> None:
    from hotstart.cli.output import say
    from hotstart.config.output_file import write_output

    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    lines = [
        f"Throughput: {len(outputs) / seconds:.2f} requests/s, "
        f"{(prompts + made) / seconds:.2f} total tokens/s, {made / seconds:.2f} output tokens/s",
        f"Total num prompt tokens:  {prompts}",
        f"Total num output tokens:  {made}",
    ]
    if cached > _CACHED_WORTH_SAYING * prompts:
        lines.append(
            f"Prefix cache: {cached} prompt tokens ({cached / prompts:.1%}) were not computed, "
            "since an earlier prompt began alike; --no-enable-prefix-caching computes them all"
        )
    say("\n".join(lines))
    result = {
        "model_id": model,
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": prompts + made,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (prompts + made) / seconds,
        "total_output_tokens": made,
        "num_cached_tokens": cached,
    }
    if path:
        write_output("--output-json", path, (json.dumps(result, indent=4) + "\n").encode())
