"""The servers of ``--compare``: what a command line says of its port, its model and its name."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hotstart.bench.launch import free_port, split_command
from hotstart.errors import ConfigError

PORT = "{port}"
"""In a command line: a free port is put here."""
_USUAL_PORTS = {
    "hotstart": 8000,
    "vllm": 8000,
    "sglang": 30000,
    "sglang.launch_server": 30000,
    "llama-server": 8080,
}
_PORT_FLAGS = ("--port", "-p")
_NAME_FLAGS = ("--served-model-name", "--served_model_name", "--alias", "-a")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_LONGEST = 48
"""Letters of a name, in a table."""


def parsed(command: str) -> tuple[tuple[str, ...], int]:
    """A command's words, and the port that its server will listen on. Raises ``ConfigError``."""
    port = free_port() if PORT in command else 0
    try:
        argv = split_command(command.replace(PORT, str(port)))
    except ValueError as error:
        raise ConfigError(f"--compare {command!r} is no command line: {error}") from None
    if not argv:
        raise ConfigError("--compare has an empty command", expected="a command that starts a server")
    named = value_of(_PORT_FLAGS, argv)
    if named.isdigit():
        port = int(named)
    port = port or _USUAL_PORTS.get(program(argv), 0)
    if not 0 < port < 1 << 16:
        raise ConfigError(
            f"--compare {command!r} does not say where its server listens",
            advice=f"Write {PORT} where the port belongs, and a free one is put there: "
            f"'{program(argv)} --port {PORT} …'",
        )
    return argv, port


def program(argv: Sequence[str]) -> str:
    """What is run: ``vllm``, or the module of ``python -m``, or the script of an interpreter."""
    words = list(_without_environment(argv))
    if words and re.fullmatch(r"python[\d.]*", os.path.basename(words[0])) and len(words) > 1:
        return words[2] if words[1] == "-m" and len(words) > 2 else os.path.basename(words[1])
    return os.path.basename(words[0]) if words else ""


def served_name(argv: Sequence[str]) -> str:
    """What the server will call its model; empty: only the server knows."""
    if named := value_of(_NAME_FLAGS, argv):
        return named
    words = list(_without_environment(argv))
    if program(argv) in ("hotstart", "vllm") and "serve" in words[:-1]:
        model = words[words.index("serve") + 1]
        return "" if model.startswith("-") else model
    return ""


def value_of(flags: Sequence[str], words: Sequence[str]) -> str:
    """The value of the first of these flags among words of a command line; empty: it is not there."""
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]
    places = [parts.index(flag) for flag in flags if flag in parts[:-1]]
    return parts[min(places) + 1] if places else ""


def model_files(argv: Sequence[str]) -> list[str]:
    """Files of the models that a command names: of directories with a config.json, and weight files."""
    found: list[str] = []
    for word in argv:
        path = Path(word.split("=", 1)[-1]).absolute()
        if (path / "config.json").is_file():
            found += [str(file) for file in path.iterdir() if file.is_file()]
        elif path.suffix in (".gguf", ".safetensors") and path.is_file():
            found.append(str(path))
    return sorted(set(found))


def model_directory(commands: Sequence[Sequence[str]]) -> str:
    """The first directory with safetensors that any command names; empty: there is none."""
    files = (file for argv in commands for file in model_files(argv))
    return next((os.path.dirname(file) for file in files if file.endswith(".safetensors")), "")


def names(commands: Sequence[tuple[Sequence[str], int]]) -> list[str]:
    """A short name for each command with its port.

    It is the program, and where several share one, the words that tell them apart.
    """
    programs = [program(argv) for argv, _ in commands]
    found: list[str] = []
    for (argv, port), own in zip(commands, programs, strict=True):
        peers = [set(peer) for (peer, _), name in zip(commands, programs, strict=True) if name == own]
        shared = set.intersection(*peers) | {str(port)}
        apart = [word for word in _telling(argv) if word not in shared] if len(peers) > 1 else []
        name = " ".join([own, *apart])
        name = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
        number = sum(1 for other in found if other == name or other.startswith(f"{name} ("))
        found.append(f"{name} ({number + 1})" if number else name)
    return found


def shown(argv: Sequence[str]) -> str:
    """As one would type it."""
    return shlex.join(_without_env_word(argv))


def _telling(argv: Sequence[str]) -> Iterator[str]:
    """Words that can tell two commands of a program apart: where it lies and listens does not."""
    for word in _without_env_word(argv):
        if (
            word.split("=", 1)[0] not in _PORT_FLAGS
            and os.path.basename(word) != program(argv)
            and not word.endswith("/python")
        ):
            yield word


def _without_env_word(argv: Sequence[str]) -> Sequence[str]:
    return argv[1:] if argv and argv[0] == "env" else argv


def _without_environment(argv: Sequence[str]) -> Iterator[str]:
    words = iter(_without_env_word(argv))
    for word in words:
        if not _ASSIGNMENT.match(word):
            yield word
            break
    yield from words
