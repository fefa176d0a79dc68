"""hotstart on one GPU, thinly: is it right, how fast does it start, does it serve.

    run_thin.py [--parts tests,reader,greedy,start,load] [--rounds 5] [--work /dev/shm/hotstart-thin]

Parts run in the order given, each guarded: one that fails or runs out of time is reported and the
next goes on. The table comes last; everything also goes to thin.json in --out (default: $OUT or the
working folder). See the README beside this file.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from hotstart.bench.client import Target, ask, request_body  # noqa: E402
from hotstart.bench.launch import Server, free_port, observe, running  # noqa: E402

TINY = (
    ("llama", "float32"), ("mistral", "float32"), ("qwen3", "float32"), ("llama-wide", "float32"),
    ("llama-wide", "bfloat16"), ("qwen3", "bfloat16"),
)  # fmt: skip
WIDE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4,
    "num_hidden_layers": 4,
}  # fmt: skip
GREEDY_TOKENS = 64
FLOOR_TOKENS = 96

Results = dict[str, Any]
Row = tuple[str, str]


class Bench:
    """One run: where things lie, what was found, and the rows of the table."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work: Path = args.work
        self.big = self.work / "big"
        self.results: Results = {}
        self.rows: list[Row] = []

    def row(self, name: str, value: str) -> None:
        self.rows.append((name, value))
        print(f"  {name:44} {value}", flush=True)

    def run(self, name: str, part: Callable[[], Results], limit: float) -> None:
        """One part within ``limit`` seconds; failures are results too."""
        print(f"== {name}", flush=True)
        begin = time.monotonic()
        try:
            with time_limit(limit):
                self.results[name] = part()
        except Exception as error:
            self.results[name] = {"error": traceback.format_exc()}
            self.row(name, f"FAILED: {type(error).__name__}: {str(error)[:2000]}")
        self.row(f"({name} took)", f"{time.monotonic() - begin:.1f} s")

    def server(self, model: Path, *flags: str) -> Server:
        port = free_port()
        argv = (
            sys.executable, "-m", "hotstart", "serve", str(model), "--host", "127.0.0.1",
            "--port", str(port), "--device", self.args.device, *flags,
        )  # fmt: skip
        return Server("hotstart", argv, Target("127.0.0.1", port, model=str(model), timeout=90), timeout=150)

    def make_big(self) -> None:
        if (self.big / "model.safetensors.index.json").exists():
            return
        begin = time.monotonic()
        run_program(
            [str(HERE / "make_model.py"), str(self.big), "--device", self.args.device, *self.args.shape],
            limit=240,
        )
        size = sum(path.stat().st_size for path in self.big.glob("*.safetensors"))
        self.row("model written", f"{size / 1e9:.2f} GB in {time.monotonic() - begin:.1f} s")

    def tests(self) -> Results:
        """The suite's GPU tests; they need the driver, so not on a CPU."""
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/device", "tests/attention"]
        # Warnings of this machine's own libraries are not what is tested.
        command += ["-p", "no:cacheprovider", "-W", "default"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
        lines = done.stdout.strip().splitlines()
        self.row("pytest -m gpu", f"exit {done.returncode}: {lines[-1] if lines else ''}")
        return {"exit": done.returncode, "output": done.stdout[-20000:]}

    def reader(self) -> Results:
        """Files to device memory, with nothing else going on, then beside a plain import of torch."""
        self.make_big()
        found: Results = {}
        for shape in ("8x2x8", "16x2x8", "4x2x16"):
            threads, buffers, mib = shape.split("x")
            options = ["--threads", threads, "--buffers", buffers, "--buffer-mib", mib]
            alone = [self.floor(*options, "--no-torch") for _ in range(3)]
            rates = sorted(one["bytes"] / one["fetch_seconds"] / 1e9 for one in alone)
            beside = [self.floor(*options) for _ in range(2)]
            found[shape] = {"alone": alone, "beside": beside}
            self.row(
                f"ring {shape} MiB",
                f"{rates[1]:.1f} GB/s ({rates[0]:.1f} to {rates[-1]:.1f}); beside import torch "
                + ", ".join(f"{one['bytes'] / one['fetch_seconds'] / 1e9:.1f}" for one in beside),
            )
        return found

    def floor(self, *options: str) -> dict[str, float]:
        spawned = time.monotonic()
        out = run_program(
            [
                str(HERE / "floor_cuda.py"),
                str(self.big),
                str(FLOOR_TOKENS),
                "--device",
                self.args.device,
                *options,
            ],
            limit=90,
        )
        found: dict[str, float] = json.loads(out.splitlines()[-1])
        for moment in ("begin", "attached", "imported", "arrived", "end"):
            if moment in found:
                found[moment] -= spawned
        return found

    def greedy(self) -> Results:
        """Greedy tokens in float32 against transformers, alone and together; bf16 by log probability."""
        import tiny_models

        cases: list[dict[str, Any]] = []
        ours: list[dict[str, Any]] = []
        for name, dtype in TINY:
            directory = self.work / f"{name}-{dtype}"
            config = WIDE if name == "llama-wide" else None
            tiny_models.write(name.removesuffix("-wide"), directory, dtype=dtype, config=config)
            generator = random.Random(1)
            prompts = [
                [generator.randrange(5, tiny_models.VOCAB) for _ in range(length)]
                for length in (3, 17, 40, 200)
            ]
            begin = time.monotonic()
            with running(self.server(directory, "--max-model-len", "512")) as target:
                calls = [partial(complete, target, prompt, GREEDY_TOKENS) for prompt in prompts]
                alone = [call() for call in calls]
                together = in_parallel(calls)
            print(f"  {name} {dtype}: {time.monotonic() - begin:.1f} s", flush=True)
            ours.append({"name": name, "dtype": dtype, "alone": alone, "together": together})
            exact = dtype == "float32"
            cases.append(
                {
                    "model": str(directory),
                    "prompts": prompts,
                    "tokens": GREEDY_TOKENS if exact else 0,
                    "given": None if exact else [one["ids"] for one in alone],
                }
            )
        path = self.work / "cases.json"
        path.write_text(json.dumps(cases))
        answers = json.loads(
            run_program([str(HERE / "reference.py"), str(path), self.args.device], limit=180).splitlines()[-1]
        )
        for mine, theirs in zip(ours, answers, strict=True):
            self.compare(mine, theirs)
        return {"ours": ours, "transformers": answers}

    def compare(self, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        title = f"{mine['name']} {mine['dtype']}"
        alone, together = ([one["ids"] for one in mine[key]] for key in ("alone", "together"))
        if mine["dtype"] == "float32":
            equal = sum(a == b for a, b in zip(alone, theirs["greedy"], strict=True))
            same = sum(a == b for a, b in zip(alone, together, strict=True))
            distinct = min(len(set(ids)) for ids in alone)
            verdict = "ok" if equal == same == len(alone) else "WRONG"
            self.row(
                title,
                f"{verdict}: {equal}/{len(alone)} prompts equal to transformers, {same}/{len(alone)}"
                f" alone as together, {distinct} distinct ids",
            )
            return
        exact, noisy = theirs["logprobs"]["float32"], theirs["logprobs"]["bfloat16"]
        own = max_difference([one["logprobs"] for one in mine["alone"]], exact)
        noise = max_difference(noisy, exact)
        verdict = "ok" if own <= 2 * noise + 0.02 else "WRONG"
        self.row(
            title, f"{verdict}: log probabilities off float32 by {own:.3f} (transformers' bf16: {noise:.3f})"
        )

    def start(self) -> Results:
        """Process start to first streamed token, alternated with the floor and a plain import."""
        self.make_big()
        rounds: list[dict[str, Any]] = []
        for number in range(self.args.rounds):
            floor = self.floor()
            begin = time.monotonic()
            subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=60)
            imported = time.monotonic() - begin
            start = observe(self.server(self.big))
            rounds.append({"floor": floor, "import": imported, "start": vars(start)})
            print(
                f"  round {number + 1}: floor {floor['end']:.2f}, import torch {imported:.2f},"
                f" answers {start.answers:.2f}, ready {start.ready:.2f}, first token {start.first_token:.2f},"
                f" second TTFT {start.second_ttft * 1e3:.0f} ms",
                flush=True,
            )
        token = [one["start"]["first_token"] for one in rounds]
        floors = [one["floor"]["end"] for one in rounds]
        self.row("floor", spread(floors))
        self.row("  of it weights on the device", spread([one["floor"]["arrived"] for one in rounds]))
        self.row("  of it import torch done", spread([one["floor"]["imported"] for one in rounds]))
        self.row("plain import torch, whole process", spread([one["import"] for one in rounds]))
        self.row("start to first token", spread(token))
        self.row("  share of the floor", f"{statistics.median(token) / statistics.median(floors):.2f} x")
        self.row("second request, first token", spread([one["start"]["second_ttft"] for one in rounds]))
        middle = sorted(rounds, key=lambda one: float(one["start"]["first_token"]))[len(rounds) // 2]
        for phase in middle["start"]["phases"]:
            if phase["end"] is not None:
                self.row(
                    f"    {phase['name']} ({phase['process']})",
                    f"{phase['start']:6.2f} to {phase['end']:6.2f} s  {phase['detail']}",
                )
        return {"rounds": rounds}

    def load(self) -> Results:
        """One stream, then 20 and 64 requests at once: all answered, and how fast."""
        self.make_big()
        found: Results = {}
        vocab = json.loads((self.big / "config.json").read_text())["vocab_size"]
        with running(self.server(self.big)) as target:
            for number, prompt_tokens, tokens in ((1, 128, 128), (20, 512, 128), (64, 512, 128)):
                prompts = [
                    [random.randrange(300, vocab) for _ in range(prompt_tokens)] for _ in range(number)
                ]
                begin = time.monotonic()
                bodies = [request_body(target, prompt, max_tokens=tokens) for prompt in prompts]
                answers = in_parallel([partial(ask, target, body) for body in bodies])
                wall = time.monotonic() - begin
                tpot = [(one.last - one.first) / max(one.tokens - 1, 1) for one in answers]
                complete_ones = sum(one.tokens == tokens for one in answers)
                found[str(number)] = {
                    "wall": wall,
                    "complete": complete_ones,
                    "ttft": [one.ttft for one in answers],
                    "tpot": tpot,
                }
                self.row(
                    f"{number} at once, {prompt_tokens} in, {tokens} out",
                    f"{complete_ones}/{number} complete, {number * tokens / wall:.0f} tok/s, TTFT"
                    f" {statistics.median(one.ttft for one in answers) * 1e3:.0f} ms, TPOT"
                    f" {statistics.median(tpot) * 1e3:.2f} ms",
                )
        return found


def complete(target: Target, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Greedy ids and their log probabilities."""
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection(target.host, target.port, timeout=target.timeout)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {text[:500]!r}")
    choice = json.loads(text)["choices"][0]
    return {"ids": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}


def in_parallel(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results in order."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def run_program(argv: list[str], limit: float) -> str:
    """Its output; an error with the end of what it said when it fails."""
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(argv[0]).name} ended with {done.returncode}: {done.stderr[-3000:]}")
    return done.stdout


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread, so that servers are stopped on the way out."""

    def expire(number: int, frame: object) -> None:
        raise TimeoutError(f"not done within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def max_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return max(
        abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)
    )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="tests,reader,greedy,start,load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/hotstart-thin"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=200, help="seconds for each part")
    parser.add_argument("--keep", action="store_true", help="leave the models where they are")
    parser.add_argument("shape", nargs="*", help="after --: options of make_model.py for the large model")
    args = parser.parse_args()
    bench = Bench(args)
    args.work.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    try:
        for name in args.parts.split(","):
            bench.run(name, getattr(bench, name), args.limit)
    finally:
        if not args.keep:
            shutil.rmtree(args.work, ignore_errors=True)
        (args.out / "thin.json").write_text(
            json.dumps({"rows": bench.rows, **bench.results}, indent=1, default=str)
        )
        print("\n" + "\n".join(f"{name:46} {value}" for name, value in bench.rows), flush=True)
    return any("FAILED" in value or "WRONG" in value for _, value in bench.rows)


if __name__ == "__main__":
    sys.exit(main())
