"""The YAML file of ``--config``: the same flags as keys, checked with file and line.

Imported only when the flag is used: yaml costs 15 ms.
"""

from __future__ import annotations

import os

import yaml

from hotstart.config.command import Command, Use
from hotstart.errors import ConfigError


def read_uses(command: Command, path: str) -> tuple[list[Use], list[ConfigError]]:
    """The uses of flags that a file holds, in its order, and what is wrong with it.

    Keys are flag names without the leading dashes, with ``-`` or ``_``; ``key.sub`` works as on
    the command line. A key without a value leaves the default.
    """
    try:
        entries = _entries(path)
    except ConfigError as error:
        return [], [error]
    uses: list[Use] = []
    problems: list[ConfigError] = []
    seen: dict[str, int] = {}
    for key, value, line in entries:
        origin = f"{os.path.basename(path)} line {line}: "
        name, _, subkey = key.partition(".")
        name = "--" + name.lstrip("-").replace("_", "-")
        full = command.complete(name)
        if isinstance(full, ConfigError):
            problems.append(ConfigError(origin + full.found, expected=full.expected, advice=full.advice))
        elif key in seen:
            problems.append(ConfigError(f"{origin}{key} is there a second time, after line {seen[key]}"))
        elif command.config_file and command.index[full][0].to == command.config_file:
            problems.append(ConfigError(f"{origin}{key} names a further file", expected="one file"))
        elif value is not None:
            row, turns_off = command.index[full]
            use = Use(row, full, turns_off=turns_off, subkey=subkey)
            use.value, use.origin = value, origin
            uses.append(use)
        seen.setdefault(key, line)
    return uses, problems


def _entries(path: str) -> list[tuple[str, object, int]]:
    """``(key, value, line)`` of the mapping in a file."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--config {path} cannot be read: {reason}", expected="a YAML file") from None
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"--config {path} holds no mapping", expected="lines such as `port: 8000`")
        return [
            (
                str(loader.construct_object(key, deep=True)),
                loader.construct_object(value, deep=True),
                key.start_mark.line + 1,
            )
            for key, value in root.value
        ]
    except (yaml.YAMLError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is no valid YAML: {detail}") from None
    finally:
        loader.dispose()
