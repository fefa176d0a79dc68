"""The YAML file of ``--config``: the same flags as keys, checked with file and line.

Imported only when the flag is used: yaml costs 15 ms.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import yaml

from hotstart.config.command import Command, Use
from hotstart.config.flags import Flag
from hotstart.config.text_file import LARGEST, read_text
from hotstart.errors import ConfigError

_MERGE = "tag:yaml.org,2002:merge"


def read_uses(command: Command, path: str) -> tuple[list[Use], list[ConfigError]]:
    """The uses of flags that a file holds, in its order, and what is wrong with it.

    Keys are flag names without the leading dashes, with ``-`` or ``_``; ``key.sub`` works as on
    the command line. A key without a value leaves the default; two keys for one flag are an error.
    """
    try:
        entries = _entries(path)
    except ConfigError as error:
        return [], [error]
    uses: list[Use] = []
    problems: list[ConfigError] = []
    seen: dict[tuple[Flag, str], tuple[str, int]] = {}
    for key, value, line in entries:
        origin = f"{os.path.basename(path)} line {line}: "
        name, _, subkey = key.partition(".")
        name = "--" + name.lstrip("-").replace("_", "-")
        full = command.complete(name)
        if isinstance(full, ConfigError):
            problems.append(ConfigError(origin + full.found, expected=full.expected, advice=full.advice))
            continue
        row, turns_off = command.index[full]
        if before := seen.get((row, subkey)):
            problems.append(_twice(origin, key, *before))
        elif command.config_file and row.to == command.config_file:
            problems.append(ConfigError(f"{origin}{key} names a further file", expected="one file"))
        elif value is not None:
            use = Use(row, full, turns_off=turns_off, subkey=subkey)
            use.value, use.origin = value, origin
            uses.append(use)
        seen.setdefault((row, subkey), (key, line))
    return uses, problems


def _twice(origin: str, key: str, first: str, line: int) -> ConfigError:
    if key == first:
        return ConfigError(f"{origin}{key} is there a second time, after line {line}", expected="one of them")
    return ConfigError(f"{origin}{key} sets what {first} in line {line} sets", expected="one of them")


def _entries(path: str) -> list[tuple[str, object, int]]:
    """``(key, value, line)`` of the mapping in a file."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--config {path} cannot be read: {reason}", expected="a YAML file") from None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"--config {path} holds no mapping", expected="lines such as `port: 8000`")
        if merge := next((key for key, _ in root.value if key.tag == _MERGE), None):
            raise yaml.MarkedYAMLError(
                problem="<< merges nothing at this level; write the keys out", problem_mark=merge.start_mark
            )
        return [
            (str(_plain(loader, key)), _plain(loader, value), key.start_mark.line + 1)
            for key, value in root.value
        ]
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"--config {path} is no valid YAML: {_detail(error)}") from None


def _detail(error: Exception) -> str:
    """What and where, without the line itself, which may hold a key."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def _plain(loader: yaml.SafeLoader, node: yaml.Node) -> object:
    """The value of a node, of the kinds that flags have. Raises YAMLError."""
    try:
        value = loader.construct_object(node, deep=True)
        size = _size(value, LARGEST)
    except yaml.YAMLError:
        raise
    except Exception as error:  # of int(), datetime() and the like, which the library calls unguarded
        problem = str(error) if isinstance(error, ValueError) else "a value does not fit its tag"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
    if size > LARGEST:
        raise yaml.MarkedYAMLError(problem="its aliases grow too large", problem_mark=node.start_mark)
    return value


def _size(value: object, most: int) -> int:
    """What a value comes to with every alias written out; counting ends above ``most``."""
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("an escape names half of a character")
        return 1 + len(value)
    parts: Iterable[object] = ()
    if isinstance(value, dict):
        parts = (*value, *value.values())
    elif isinstance(value, list):
        parts = value
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise ValueError(f"a {type(value).__name__} is no value of a flag; quote what is meant as text")
    size = 1
    for part in parts:
        size += _size(part, most - size)
        if size > most:
            break
    return size
