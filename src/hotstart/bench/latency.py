"""``hotstart bench latency``: seconds that one batch takes, from prompts in to texts out, without a server.

Flags, printed lines and JSON keys are those of ``vllm bench latency``.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hotstart.bench import in_process
from hotstart.bench.output import check_outputs
from hotstart.config.flags import Group, flag
from hotstart.config.values import Text, Whole
from hotstart.units import format_seconds

if TYPE_CHECKING:
    from hotstart.llm import LLM

PERCENTAGES = (10, 25, 50, 75, 90, 99)
_WORTH_SAYING = 10.0
"""Seconds of the whole from which on it is said beforehand how long it will take."""

LATENCY = in_process.command(
    "bench latency",
    "Measure how long one batch takes in this process: the same random prompts, again and again.",
    Group(
        "What to run",
        flag("--input-len", to="input_len", kind=Whole(1), default=32, help="tokens of each prompt"),
        flag("--output-len", to="output_len", kind=Whole(1), default=128, help="tokens of each answer"),
        flag("--batch-size", to="batch_size", kind=Whole(1), default=8, help="prompts at once"),
        flag("--n", to="n", kind=Whole(1, 128), default=1, help="answers to each prompt"),
        flag(
            "--num-iters-warmup",
            to="num_iters_warmup",
            kind=Whole(0),
            default=10,
            help="runs before those that count",
        ),
        flag("--num-iters", to="num_iters", kind=Whole(1), default=30, help="runs that count"),
        flag("--output-json", to="output_json", kind=Text("FILE"), help="write every latency"),
    ),
)


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ``HotstartError``."""
    values, engine = in_process.parse(LATENCY, argv)
    check_outputs({"--output-json": values.get("output_json")})
    # Every run has the same prompts; only the first would compute them.
    engine.setdefault("cache.enable_prefix_caching", False)
    llm = in_process.load(engine)
    latencies = measure(llm, values, engine.get("model.seed", 0))
    result = {
        "model_id": engine["model.model"],
        "avg_latency": fmean(latencies),
        "latencies": latencies,
        "percentiles": {percent: percentile(latencies, percent) for percent in PERCENTAGES},
    }
    _report(result, values)
    return 0


def measure(llm: LLM, values: dict[str, Any], seed: int) -> list[float]:
    """Seconds of each run that counts."""
    from hotstart.messages import SamplingParams

    in_process.check_fits(llm, values["input_len"], values["output_len"], "--input-len or --output-len")
    dice = random.Random(seed)
    prompts = [
        in_process.random_ids(dice, llm.vocab_size, values["input_len"]) for _ in range(values["batch_size"])
    ]
    params = SamplingParams(n=values["n"], ignore_eos=True, max_tokens=values["output_len"])

    def run() -> float:
        begin = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - begin

    warmups, counted = values["num_iters_warmup"], values["num_iters"]
    latencies: list[float] = []
    if warmups:
        print("Warming up...", flush=True)
    for done in range(warmups + counted):
        latencies.append(run())
        expected = latencies[0] * (warmups + counted)
        if not done and expected > _WORTH_SAYING:
            print(
                f"one run takes {format_seconds(latencies[0])}, all {warmups + counted} of them about "
                f"{format_seconds(expected)}",
                file=sys.stderr,
            )
    return latencies[warmups:]


def _report(result: dict[str, Any], values: dict[str, Any]) -> None:
    from hotstart.cli.output import say
    from hotstart.config.output_file import write_output

    tokens = values["batch_size"] * values["n"] * values["output_len"]
    lines = [f"Avg latency: {result['avg_latency']} seconds"]
    lines += [f"{p}% percentile latency: {value} seconds" for p, value in result["percentiles"].items()]
    lines.append(f"Output throughput: {tokens / result['avg_latency']:.2f} tokens/s ({tokens} tokens a run)")
    say("\n".join(lines))
    if path := values.get("output_json"):
        write_output("--output-json", path, (json.dumps(result, indent=4) + "\n").encode())


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest values, as numpy's default does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
