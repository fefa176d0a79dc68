"""A run: every request at its time, and what came of it."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from msgspec import Struct

from hotstart.bench.serving import prefix_cache
from hotstart.bench.serving.answer import Answer
from hotstart.bench.serving.arrivals import Arrivals, schedule
from hotstart.bench.serving.client import Client, Server
from hotstart.bench.serving.delay import LoopDelay
from hotstart.bench.serving.requests import RequestForm, SampleRequest, turned
from hotstart.errors import EngineError

_EVERY = 0.2
"""Seconds between two states of the progress line."""


class Load(Struct, frozen=True):
    """What is to be sent, how, and when."""

    endpoint: str
    form: RequestForm
    requests: list[SampleRequest]
    arrivals: Arrivals = Arrivals()
    max_concurrency: int | None = None
    warmups: int = 0
    test: bool = False
    """One request first, which must succeed."""
    progress: bool = True
    seed: int = 0


class Run(Struct, frozen=True):
    """What came of it."""

    answers: list[Answer]
    duration: float
    """Seconds from the beginning of the plan to the last end."""
    late: list[float]
    """How late the event loop was, in seconds, at each look."""
    reuse: prefix_cache.Reuse | None


async def measure(server: Server, load: Load) -> Run:
    """Send everything. Raises ``EngineError`` where the test request or the warm-up fails."""
    dice = random.Random(load.seed)
    async with Client(server) as client:
        await _warm_up(client, load, dice)
        offsets = schedule(len(load.requests), load.arrivals, dice)
        before = await prefix_cache.counters(client, load.form.model)
        with _no_collection(), LoopDelay() as delay:
            answers, duration = await _send_all(client, load, offsets)
        after = await prefix_cache.counters(client, load.form.model)
        return Run(answers, duration, delay.late, prefix_cache.reuse(before, after, answers))


async def _warm_up(client: Client, load: Load, dice: random.Random) -> None:
    if load.test:
        _check([await _ask(client, load, turned(load.requests[0], dice))], "the test request")
    if load.warmups:
        print(f"Warming up with {load.warmups} requests...", file=sys.stderr)
        slots = _slots(load)
        chosen = [load.requests[number % len(load.requests)] for number in range(load.warmups)]

        async def one(request: SampleRequest) -> Answer:
            async with slots:
                return await _ask(client, load, request)

        _check(await asyncio.gather(*(one(turned(request, dice)) for request in chosen)), "the warm-up")


def _check(answers: Sequence[Answer], what: str) -> None:
    if all(answer.error for answer in answers):
        raise EngineError(
            f"{what} failed: {answers[0].error}",
            advice="Nothing was measured; see what the server's log says",
        )


async def _ask(client: Client, load: Load, request: SampleRequest) -> Answer:
    answer = Answer()
    await client.stream(load.endpoint, load.form.body(request), answer, request.request_id)
    return answer


def _slots(load: Load) -> asyncio.Semaphore | nullcontext[None]:
    return asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()


async def _send_all(client: Client, load: Load, offsets: Sequence[float]) -> tuple[list[Answer], float]:
    slots = _slots(load)
    answers = [Answer() for _ in load.requests]

    async def one(request: SampleRequest, answer: Answer) -> None:
        answer.arrived = time.perf_counter()
        async with slots:
            await client.stream(load.endpoint, load.form.body(request), answer, request.request_id)
        progress.done += 1

    with _Progress(len(answers), shown=load.progress) as progress:
        begin = time.perf_counter()
        tasks = []
        for request, answer, offset in zip(load.requests, answers, offsets, strict=True):
            answer.planned = begin + offset
            if (wait := answer.planned - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(request, answer)))
        await asyncio.gather(*tasks)
        return answers, time.perf_counter() - begin


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without pauses to look for garbage: a run makes next to none in cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Progress:
    """A line on a terminal that is written anew."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self.done = 0
        self._total = total
        self._shown = shown and sys.stderr.isatty()
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> _Progress:
        if self._shown:
            self._task = asyncio.create_task(self._write())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    async def _write(self) -> None:
        begin = time.monotonic()
        while True:
            seconds = time.monotonic() - begin
            line = f"\r{self.done} of {self._total} requests, {seconds:.0f} s "
            print(line, end="", file=sys.stderr, flush=True)
            await asyncio.sleep(_EVERY)
