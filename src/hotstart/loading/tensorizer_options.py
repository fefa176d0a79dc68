"""``--model-loader-extra-config`` for ``--load-format tensorizer``: vLLM's keys, and what they mean here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from hotstart.checkpoint.tensorizer import DEFAULT_NAME, read_key
from hotstart.config.load_formats import SECRETS, key_problems
from hotstart.errors import ConfigError, HotstartError, raise_all
from hotstart.storage.location import shown

if TYPE_CHECKING:
    from hotstart.config.settings import ModelConfig

_RANK = re.compile(r"%(0[1-9])?d")
"""How vLLM writes the rank into a file's name."""


class TensorizerOptions(Struct, frozen=True):
    """Parsed; None: left to the library."""

    name: str = DEFAULT_NAME
    """Of the file, beside config.json."""
    verify_hash: bool = True
    num_readers: int | None = None
    keyfile: str | None = None
    buffer_size: int | None = None
    """Bytes that are read ahead of a store."""

    @classmethod
    def parse(cls, given: Mapping[str, Any], model: ModelConfig | None = None) -> TensorizerOptions:
        """Reads nothing. Without ``model`` it is not asked whether the weights lie there.

        Raises ConfigError, or ProblemsFound with all of them.
        """
        raise_all(key_problems("tensorizer", given))
        nested = given.get("tensorizer_config", {})
        problems = [
            problem
            for key in nested
            if key in given
            for problem in _differing({key: given[key], f"tensorizer_config.{key}": nested[key]})
        ]
        given = {**given, **nested}
        kwargs = given.get("deserialization_kwargs", {})
        given |= {f"deserialization_kwargs.{key}": value for key, value in kwargs.items()}
        readers = _given(given, "concurrency", "num_readers", "deserialization_kwargs.num_readers")
        hashes = _given(given, "verify_hash", "deserialization_kwargs.verify_hash")
        problems += [*_differing(readers), *_differing(hashes)]
        name = DEFAULT_NAME
        try:
            name = _name(given, model)
        except HotstartError as error:
            problems.append(error)
        raise_all(problems)
        return cls(
            name=name,
            verify_hash=False not in hashes.values(),
            num_readers=next(iter(readers.values()), None),
            keyfile=given.get("encryption_keyfile"),
            buffer_size=given.get("stream_kwargs", {}).get("buffer_size"),
        )


def check_options(given: Mapping[str, Any], model: ModelConfig, place: str) -> None:
    """Raise for what can be known before the model is looked for; ``place``: the scheme, ``dir`` or ``hub``.

    Raises as :meth:`TensorizerOptions.parse` does.
    """
    options = TensorizerOptions.parse(given, model)
    _check_store({**given, **given.get("tensorizer_config", {})}, place)
    if options.keyfile is not None:
        read_key(options.keyfile, "encryption_keyfile")


def _check_store(given: Mapping[str, Any], place: str) -> None:
    """Keys of S3 are for models in S3, and their endpoint is an address."""
    keys = [key for key in given if key.startswith(SECRETS)]
    if not keys:
        return
    if place != "s3":
        where = {"dir": "a directory", "hub": "a name on the hub"}.get(place, f"at {place}://")
        raise ConfigError(
            f"--model-loader-extra-config has {' and '.join(keys)}, and MODEL is {where}",
            expected="an address that begins with s3://",
            advice="Leave them out",
        )
    if endpoint := given.get("s3_endpoint"):
        from hotstart.storage.variables import Value, option, web_address

        web_address(Value(endpoint, option("s3_endpoint")))


def _given(options: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: options[key] for key in keys if key in options}


def _differing(values: Mapping[str, Any]) -> list[HotstartError]:
    """Keys of one meaning that say different things."""
    if all(value == next(iter(values.values())) for value in values.values()):
        return []
    return [
        ConfigError(
            f"--model-loader-extra-config has {' and '.join(values)}, which differ", expected="one of them"
        )
    ]


def _name(given: Mapping[str, Any], model: ModelConfig | None) -> str:
    """The file, which must lie in MODEL; ``%03d`` stands for the rank."""
    uri, directory = given.get("tensorizer_uri"), given.get("tensorizer_dir")
    if uri is not None and directory is not None:
        raise ConfigError(
            "--model-loader-extra-config has tensorizer_uri and tensorizer_dir", expected="one of them"
        )
    folder, name = (os.path.dirname(uri), os.path.basename(uri)) if uri else (directory, DEFAULT_NAME)
    if folder and model is not None:
        _check_folder(folder, model)
    rest, ranks = _RANK.subn("0", name)
    if name in ("", ".", "..") or "%" in rest or ranks > 1:
        raise ConfigError(
            f"--model-loader-extra-config: tensorizer_uri ends in {name!r}",
            expected="a file's name, with %03d at most for the rank",
        )
    return name % 0 if ranks else name


def _check_folder(folder: str, model: ModelConfig) -> None:
    here = model.location or model.model
    if _same(folder, here) or (model.path and _same(folder, model.path)):
        return
    raise ConfigError(
        f"--model-loader-extra-config names weights in {folder}, and MODEL is {shown(here)}",
        expected="weights, config.json and tokenizer in one place",
        advice=f"Pass it as MODEL: hotstart serve {folder} --load-format tensorizer",
    )


def _same(one: str, other: str) -> bool:
    if "://" in one or "://" in other:
        return one.rstrip("/") == other.rstrip("/")
    return _real(one) == _real(other)


def _real(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))
