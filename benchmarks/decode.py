"""Decoding speed of ``hotstart serve`` against transformers' ``generate``, one stream and several, in turns.

decode.py MODEL [--serve-flags "--threads 2"]
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM

from hotstart.bench.client import Target, ask, request_body
from hotstart.bench.launch import Server, free_port, running

PROMPT = list(range(1000, 1032))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--serve-flags", default="", help="flags of hotstart serve, in one string")
    args = parser.parse_args()
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    port = free_port()
    program = str(Path(sys.executable).with_name("hotstart"))
    command = (program, "serve", args.model, "--port", str(port), *shlex.split(args.serve_flags))
    with running(Server("hotstart", command, Target("127.0.0.1", port, model=args.model))) as target:
        rows = measure(target, reference, args)
    print(
        f"{args.tokens} tokens after a prompt of {len(PROMPT)}, median of {args.rounds} rounds\n{'':<24}tok/s"
    )
    for name, rate in rows.items():
        print(f"{name:<24}{rate:>5.1f}")
    one, several = "hotstart, 1 stream", f"hotstart, {args.streams} streams"
    print(f"one stream: {rows[one] / rows['transformers, 1 stream']:.2f} x transformers")
    print(f"{args.streams} streams: {rows[several] / rows[one]:.2f} x one stream")
    return 0


def measure(target: Target, reference: torch.nn.Module, args: argparse.Namespace) -> dict[str, float]:
    tokens, streams = args.tokens, args.streams
    ways: dict[str, Callable[[], float]] = {
        "hotstart, 1 stream": lambda: served(target, 1, tokens),
        "transformers, 1 stream": lambda: generated(reference, 1, tokens),
        f"hotstart, {streams} streams": lambda: served(target, streams, tokens),
        f"transformers, {streams} streams": lambda: generated(reference, streams, tokens),
    }
    for way in ways.values():
        way()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            rates[name].append(way())
    return {name: median(values) for name, values in rates.items()}


def served(target: Target, streams: int, tokens: int) -> float:
    """Tokens per second of all streams, over HTTP; prompts differ in their first token, so none is reused."""

    def one(number: int) -> int:
        prompt = [2000 + time.monotonic_ns() % 20000, number, *PROMPT[2:]]
        return ask(target, request_body(target, prompt, max_tokens=tokens)).tokens

    begin = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        total = sum(pool.map(one, range(streams)))
    return total / (time.monotonic() - begin)


def generated(reference: torch.nn.Module, streams: int, tokens: int) -> float:
    ids = torch.tensor([PROMPT] * streams)
    begin = time.monotonic()
    with torch.inference_mode():
        reference.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
        )
    return streams * tokens / (time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(main())
