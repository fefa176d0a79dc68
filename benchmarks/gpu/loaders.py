"""Every loader into a GPU's memory, side by side; then each --load-format served once, the texts compared.

    python benchmarks/gpu/loaders.py [--rounds 3] [--limit 460] [--work /dev/shm/hotstart-loaders]
                                     [--disk /tmp/hotstart-loaders] [--small DIR] [--big DIR]

Two random models are written into memory, unless directories are given: a small one (0.3 GB) and a large
one (7.8 GB). `hotstart bench load --device cuda` measures every loader that is installed from memory and
from a copy on a disk (of the large model, --disk-gb of it), page cache warm and cold. Then each format is
served with both models, several servers at once since nothing is timed, and is asked for one greedy answer.

What fails is a row with its error, and the rest goes on; what would take longer than --limit seconds in
all is left out, and said to be. The table is markdown; every number goes to loaders.json in --out (default:
$OUT or the working folder). `--device cpu` checks the script on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "src"), str(HERE)]

from hotstart.bench.launch import free_port  # noqa: E402
from hotstart.bench.load_loaders import NAMED  # noqa: E402
from storage import copy_of  # noqa: E402

SMALL = ("--layers", "30", "--hidden", "576", "--intermediate", "1536", "--heads", "9", "--kv-heads", "3",
         "--shards", "1")  # fmt: skip
BIG = ("--layers", "16", "--shards", "4")
FORMATS = ("auto", "fastsafetensors", "instanttensor", "runai_streamer", "tensorizer")
PROMPT, TOKENS = "The weights have come from storage, and so", 24
HEAD = ("model", "from", "loader", "GB/s", "seconds [min - max]", "x ceiling", "GPU peak", "host peak", "how")

Results = dict[str, Any]


class Run:
    """One run: where things lie, what is left of the time, and what was found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.ends = time.monotonic() + args.limit
        self.work: Path = args.work
        self.models: dict[str, Path] = {}
        self.tables: list[Results] = []
        self.served: list[Results] = []
        self.failed: list[Results] = []
        self.environ = dict(os.environ)
        path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environ["PYTHONPATH"] = os.pathsep.join(path)
        self.environ["HOTSTART_CACHE_ROOT"] = str(self.work / "cache")
        self.environ |= cuda_libraries(self.work / "lib")

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def step(self, name: str, work: Callable[[], object], needs: float = 5.0) -> None:
        """One part; that it failed is a result. Skipped with less than ``needs`` seconds left."""
        began = time.monotonic()
        error = ""
        if self.left < needs:
            error = f"left out: {self.left:.0f} s are left, and it takes about {needs:.0f}"
        else:
            try:
                work()
            except Exception as problem:
                error = f"{type(problem).__name__}: {str(problem)[-1500:]}"
        if error:
            self.failed.append({"step": name, "error": error})
        took = time.monotonic() - began
        print(f"== {name}: {error or 'done'} ({took:.1f} s, {self.left:.0f} s left)", flush=True)
        self.save()

    def program(self, argv: list[str], limit: float, **environ: str) -> str:
        """Run a Python program; its output. Raises RuntimeError, with its last lines."""
        process = subprocess.Popen(
            [sys.executable, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environ | environ,
            start_new_session=True,
        )
        try:
            out, said = process.communicate(timeout=max(1.0, min(limit, self.left)))
        except subprocess.TimeoutExpired:
            end_group(process)
            raise RuntimeError("not done in time") from None
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {(out + said).strip()[-1500:]}")
        return out

    def make(self, name: str, shape: tuple[str, ...], given: Path | None) -> None:
        """A random model in memory."""
        self.models[name] = given or self.work / name
        if given is None and not (self.models[name] / "model.safetensors.index.json").exists():
            maker = [str(HERE / "make_model.py"), str(self.models[name]), "--device", self.args.device]
            self.program([*maker, *shape], 120)

    def copy(self, name: str, gigabytes: float) -> None:
        """Onto the disk, as many files as fit, of a model in memory."""
        target = copy_of(self.models[name], self.args.disk / name, int(gigabytes * 1e9))
        self.models[f"{name} on disk"] = target

    def bench(self, name: str, medium: str, cache: str, seconds_a_round: float, only: str = "") -> None:
        """All loaders over one model; fewer rounds when time is short."""
        model = self.models[name]
        rounds = 1 if only else max(1, min(self.args.rounds, int(self.left / seconds_a_round)))
        document = self.work / "load.json"
        document.unlink(missing_ok=True)
        chosen = [only] if only else side_by_side(self.args.device)
        argv = ["-m", "hotstart", "bench", "load", str(model), "--device", self.args.device]
        argv += ["--cache", cache, "--iterations", str(rounds), "--timeout", "45"]
        argv += ["--loader", *chosen, "--json", str(document)]
        folder = self.work / "tmp" if medium == "memory" else self.args.disk / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        problem = ""
        try:
            print(self.program(argv, 600, TMPDIR=str(folder)), flush=True)
        except RuntimeError as error:  # other bytes than expected: there is a report all the same
            problem = str(error)
            if not document.exists():
                raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found = json.loads(document.read_text())
        self.tables.append({**found, "model": name.split()[0], "medium": medium, "problem": problem})
        if problem:
            raise RuntimeError(problem)

    def convert(self, name: str) -> None:
        """Into Tensorizer's format, for serving."""
        target = self.work / f"{name}-tensorizer"
        argv = ["-m", "hotstart", "convert", "tensorizer", str(self.models[name]), str(target)]
        self.program(argv, 120)
        self.models[f"{name} tensorizer"] = target

    def serve_all(self, name: str) -> None:
        """Each format once; texts are compared with those of ``auto``."""
        together = max(1, min(len(FORMATS), (os.cpu_count() or 2) // 3))
        with ThreadPoolExecutor(together) as pool:
            answers = list(pool.map(lambda each: self.serve(name, each), FORMATS))
        expected = answers[0].get("text")
        for answer in answers:
            answer["same"] = bool(expected) and answer.get("text") == expected
        self.served += answers
        if not all(answer["same"] for answer in answers):
            wrong = [answer["format"] for answer in answers if not answer["same"]]
            raise RuntimeError(f"no answer, or another one than auto's: {', '.join(wrong)}")

    def serve(self, name: str, load_format: str) -> Results:
        """One server, one greedy answer, and what its log says of the loader."""
        found: Results = {"model": name, "format": load_format}
        model = self.models.get(f"{name} tensorizer" if load_format == "tensorizer" else name)
        if model is None:
            return found | {"error": "there is no model: its conversion failed"}
        port, log = free_port(), self.work / f"serve-{name}-{load_format}.log"
        argv = [sys.executable, "-m", "hotstart", "serve", str(model), "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--device", self.args.device, "--load-format", load_format]
        argv += ["--max-model-len", "512", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "512MiB"]
        with log.open("w") as output:
            process = subprocess.Popen(
                argv, stdout=output, stderr=output, env=self.environ, start_new_session=True
            )
            try:
                began = time.monotonic()
                answer = self.wait_and_ask(process, port)
                found |= {"text": answer, "seconds": time.monotonic() - began}
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {error}"
            finally:
                end_group(process)
        lines = log.read_text(errors="replace").splitlines()
        found["direct"] = next((line[line.index("direct: ") :] for line in lines if "direct: " in line), "")
        found["weights"] = next((line for line in lines if "read weights: " in line), "")
        if "error" in found:
            found["log"] = "\n".join(lines[-30:])
            told = [line for line in lines if " error" in line.lower()]
            found["error"] += f"; {(told or lines or [''])[-1].strip()[:300]}"
        return found

    def wait_and_ask(self, process: subprocess.Popen[bytes], port: int) -> str:
        """The text, once the server is ready. Raises what went wrong."""
        deadline = time.monotonic() + max(1.0, min(90.0, self.left))
        while True:
            with suppress(OSError, http.client.HTTPException):
                if call(port, "GET", "/health")[0] == 200:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError("the server was not ready in time")
            time.sleep(0.1)
        name = json.loads(call(port, "GET", "/v1/models")[1])["data"][0]["id"]
        body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        status, answer = call(port, "POST", "/v1/completions", body)
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {answer[:300]!r}")
        return str(json.loads(answer)["choices"][0]["text"])

    def save(self) -> None:
        """Everything so far: a run that is ended early has its numbers."""
        everything = {"loads": self.tables, "served": self.served, "failed": self.failed}
        (self.args.out / "loaders.json").write_text(json.dumps(everything, indent=1))
        (self.args.out / "loaders.md").write_text(markdown(self))


def side_by_side(device: str) -> list[str]:
    """Loaders of files, absent ones too, but for transformers, whose import takes longest."""
    kind = "cpu" if device == "cpu" else "cuda"
    return [
        name
        for name, loader in NAMED.items()
        if kind in loader.devices
        and "file" in loader.schemes
        and "safetensors" in loader.formats
        and name != "transformers"
    ]


def cuda_libraries(folder: Path) -> dict[str, str]:
    """Variables by which libraries find CUDA's where only torch's packages have it, under other names."""
    spec = find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    roots += list(Path("/usr/local").glob("cuda*/lib64"))
    added = []
    for library, pattern in (("libcudart.so", "libcudart.so*"), ("libcufile.so.0", "libcufile.so*")):
        if can_open(library):
            continue
        existing = [found for root in roots if (found := sorted(root.rglob(pattern)))]
        if existing:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                (folder / library).symlink_to(existing[0][-1])
            added = [str(folder)]
    known = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": os.pathsep.join([*added, *([known] if known else [])])} if added else {}


def can_open(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def call(port: int, method: str, path: str, body: Results | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def end_group(process: subprocess.Popen[Any]) -> None:
    """A program of ours and what it has started: politely, then not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def load_rows(table: Results) -> Iterator[tuple[str, ...]]:
    """Rows of one `bench load`: the ceiling, loaders, then those that failed or are not there."""
    nbytes = table["bytes"]
    for state in table["states"]:
        medium = table["medium"] if table["medium"] == "memory" else f"disk, {state['state']}"
        ceiling = state["ceiling"].get("seconds", 0.0)
        most = max((len(rounds) for rounds in state["plain"].values()), default=0)
        readers = {name: rounds for name, rounds in state["plain"].items() if len(rounds) == most}
        for name, rounds in {**readers, **state["loaders"]}.items():
            error = next((each["error"] for each in rounds if each["error"]), "")
            if error:
                yield table["model"], medium, name, "", "", "", "", "", f"failed: {error}"
                continue
            seconds = [each["seconds"] for each in rounds]
            middle = statistics.median(seconds)
            yield (
                table["model"],
                medium,
                name,
                f"{nbytes / middle / 1e9:.1f}",
                f"{middle:.3f} [{min(seconds):.3f} - {max(seconds):.3f}]",
                f"{ceiling / middle:.2f}" if ceiling else "",
                f"{max(each['device_peak'] for each in rounds) / 1e9:.2f} GB",
                f"{max(each['peak'] for each in rounds) / 1e9:.2f} GB",
                rounds[0]["note"],
            )
    for name, reason in table["not_measured"].items():
        yield table["model"], table["medium"], name, "", "", "", "", "", f"not measured: {reason}"


def markdown(run: Run) -> str:
    """Everything as tables."""
    device = next((table["device"] for table in run.tables), run.args.device)
    lines = [f"Loaders into {device}; medians of the rounds.", "", line(HEAD), line(("---",) * len(HEAD))]
    lines += [line(row) for table in run.tables for row in load_rows(table)]
    served = ("model", "--load-format", "same text as auto", "direct", "text, or error")
    lines += ["", line(served), line(("---",) * len(served))]
    for each in run.served:
        said = each.get("error") or repr(each.get("text", ""))
        same = "yes" if each.get("same") else "NO"
        direct = each["direct"] if each.get("direct") else each.get("weights", "")
        lines.append(line((each["model"], f"`{each['format']}`", same, direct, said)))
    lines += ["", *(f"- {each['step']}: {' '.join(each['error'].split())}" for each in run.failed)]
    return "\n".join(lines) + "\n"


def line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=460, help="seconds in all")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/hotstart-loaders"))
    parser.add_argument("--disk", type=Path, default=Path("/tmp/hotstart-loaders"))
    parser.add_argument("--disk-gb", type=float, default=4.0, help="of the large model, as much goes there")
    parser.add_argument("--small", type=Path, help="a model's directory, instead of a generated one")
    parser.add_argument("--big", type=Path, help="the same for the large one")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("shape", nargs="*", help="after --: flags of make_model.py for the large model")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    try:
        run.step("small model", lambda: run.make("small", SMALL, args.small))
        run.step("large model", lambda: run.make("big", tuple(args.shape) or BIG, args.big))
        run.step("large, memory", lambda: run.bench("big", "memory", "warm", 30), 40)
        for name in ("small", "big"):
            run.step(f"{name} to tensorizer", lambda name=name: run.convert(name))
            run.step(f"{name} served", lambda name=name: run.serve_all(name), 30)
            shutil.rmtree(args.work / f"{name}-tensorizer", ignore_errors=True)
        run.step("small, memory", lambda: run.bench("small", "memory", "warm", 12), 15)
        run.step("large to disk", lambda: run.copy("big", args.disk_gb))
        run.step("large, disk", lambda: run.bench("big on disk", "disk", "both", 60), 60)
        run.step("small to disk", lambda: run.copy("small", args.disk_gb))
        run.step("small, disk", lambda: run.bench("small on disk", "disk", "both", 24), 25)
        if not NAMED["transformers"].absent:
            only = "transformers"
            run.step("small, transformers", lambda: run.bench("small", "memory", "warm", 30, only), 30)
            run.step("large, transformers", lambda: run.bench("big", "memory", "warm", 30, only), 30)
    finally:
        run.save()
        shutil.rmtree(args.work, ignore_errors=True)
        shutil.rmtree(args.disk, ignore_errors=True)
        print("\n" + markdown(run), flush=True)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
