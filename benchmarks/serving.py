"""A load of equal requests against running OpenAI servers, in turns: throughput, TTFT, TPOT.

    serving.py --server hotstart=http://localhost:8000 --server other=http://localhost:9000
    serving.py --command "hotstart=8000:hotstart serve DIR --port 8000" --command "vllm=9000:vllm serve …"

A --command is started for each of its turns and stopped after it, so that no idle neighbour takes
part: on two cores even a server that nobody asks is felt.

Prompts are random token ids, so that every server gets the same lengths and no cache helps. TPOT is
(last token - first token) / (tokens - 1) of each request, as vLLM's benchmark defines it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import mean, median, quantiles
from urllib.parse import urlsplit

from hotstart.bench.client import Answer, Target, ask, get, request_body
from hotstart.bench.launch import Server, running, split_command


@dataclass(frozen=True)
class Load:
    requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Result:
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def ttfts(self) -> list[float]:
        return [answer.ttft for answer in self.answers]

    @property
    def tpots(self) -> list[float]:
        many = [answer for answer in self.answers if answer.tokens > 1]
        return [(answer.last - answer.first) / (answer.tokens - 1) for answer in many]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", default=[], help="NAME=URL; several are taken in turns")
    parser.add_argument("--command", action="append", default=[], help="NAME=PORT:COMMAND, taken in turns")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    load = Load(args.requests, args.concurrency, args.input_tokens, args.output_tokens)
    turns: dict[str, Callable[[], AbstractContextManager[Target]]] = {}
    for server in args.server:
        name, where = target(server)
        turns[name] = partial(nullcontext, where)
    for command in args.command:
        name, _, rest = command.partition("=")
        port, _, words = rest.partition(":")
        turns[name] = partial(
            running, Server(name, split_command(words), Target("127.0.0.1", int(port)), early=False)
        )
    results: dict[str, list[Result]] = {name: [] for name in turns}
    for number in range(args.rounds):
        for name, turn in turns.items():
            with turn() as where:
                run(where, Load(2, 2, load.input_tokens, 4))
                results[name].append(run(where, load))
            print(f"round {number + 1}, {name}: {results[name][-1].tokens_per_second:.1f} tok/s", flush=True)
    print(table(load, results))
    return 0


def target(server: str) -> tuple[str, Target]:
    name, _, url = server.partition("=")
    address = urlsplit(url)
    found = Target(address.hostname or "127.0.0.1", address.port or 80)
    status, body = get(found, "/v1/models")
    if status != 200:
        raise SystemExit(f"{name}: /v1/models answered {status}")
    return name, Target(found.host, found.port, model=json.loads(body)["data"][0]["id"])


def run(where: Target, load: Load) -> Result:
    def one(number: int) -> Answer:
        prompt = random.SystemRandom().choices(range(1000, 30000), k=load.input_tokens)
        return ask(where, request_body(where, prompt, max_tokens=load.output_tokens))

    begin = time.monotonic()
    with ThreadPoolExecutor(load.concurrency) as pool:
        answers = tuple(pool.map(one, range(load.requests)))
    return Result(time.monotonic() - begin, answers)


def table(load: Load, results: dict[str, list[Result]]) -> str:
    lines = [
        f"{load.requests} requests, concurrency {load.concurrency}, {load.input_tokens} tokens in, "
        f"{load.output_tokens} out; median of the rounds",
        f"{'ms but for tok/s':<18}{'tok/s':>8}{'TTFT mean':>12}{'median':>9}{'P99':>9}"
        f"{'TPOT mean':>12}{'median':>9}{'P99':>9}",
    ]
    for name, rounds in results.items():
        numbers = [median(column) for column in zip(*(figures(result) for result in rounds), strict=True)]
        rate, *times = numbers
        cells = [f"{value * 1e3:.1f}" for value in times]
        widths = (12, 9, 9, 12, 9, 9)
        lines.append(
            f"{name:<18}{rate:>8.1f}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
        )
    return "\n".join(lines)


def figures(result: Result) -> tuple[float, ...]:
    return (result.tokens_per_second, *spread(result.ttfts), *spread(result.tpots))


def spread(values: list[float]) -> tuple[float, float, float]:
    return mean(values), median(values), quantiles(values, n=100, method="inclusive")[98]


if __name__ == "__main__":
    sys.exit(main())
