"""Is the client of ``bench serve`` the bottleneck? Many streams at a known pace, one process, one core.

    bench_client.py [--streams 500] [--chunks-per-second 5000] [--ttft 1] [--seconds 10]

A server in a process of its own sends every chunk when its script says so. What the client measures is
then known beforehand: what it adds is printed, beside how late the server itself was, since both share
the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from hotstart.bench.launch import free_port

STUB = Path(__file__).parent.parent / "tests" / "stub_streams.py"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--chunks-per-second", type=int, default=5000)
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    gap = args.streams / args.chunks_per_second
    tokens = int(args.seconds / gap)
    port, cores = free_port(), sorted(os.sched_getaffinity(0))
    script = ["--ttft", str(args.ttft), "--gap", str(gap), "--tokens", str(tokens)]
    server = subprocess.Popen(
        ["taskset", "-c", str(cores[-1]), sys.executable, str(STUB), str(port), *script],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        result = bench(port, args.streams, tokens, cores[0])
    finally:
        server.terminate()
        server.wait()
    report(result, args, gap)
    return 0


def bench(port: int, streams: int, tokens: int, core: int) -> dict[str, float]:
    """The result of one run, and the client's share of its core."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = Path(folder, "prompts.jsonl"), Path(folder, "result.json")
        prompts.write_text("\n".join(json.dumps({"prompt": f"a b {number}"}) for number in range(streams)))
        command = [
            "taskset", "-c", str(core), sys.executable, "-m", "hotstart", "bench", "serve",
            "--port", str(port),
            "--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template",
            "--num-prompts", str(streams), "--custom-output-len", str(tokens),
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-filename", str(out),
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result: dict[str, float] = json.loads(out.read_text())
        result["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return result


def report(result: dict[str, float], args: argparse.Namespace, gap: float) -> None:
    chunks = result["total_output_tokens"]
    print(f"chunks: {chunks:.0f}, {chunks / result['duration']:.0f}/s; failed: {result['failed']:.0f}")
    print(f"client: {result['cpu']:.2f} s of one core, its start included, in {result['duration']:.2f} s")
    for name, scripted in (("ttft", args.ttft * 1000), ("tpot", gap * 1000)):
        mean, p99 = result[f"mean_{name}_ms"], result[f"p99_{name}_ms"]
        share = mean / scripted - 1
        print(f"{name.upper()}: scripted {scripted:.2f} ms, mean {mean:.2f} ({share:+.1%}), P99 {p99:.2f}")


if __name__ == "__main__":
    sys.exit(main())
