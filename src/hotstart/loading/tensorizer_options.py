"""``--model-loader-extra-config`` for ``--load-format tensorizer``: vLLM's keys, and what they mean here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from hotstart.checkpoint.tensorizer import DEFAULT_NAME
from hotstart.config.load_formats import key_problems
from hotstart.errors import ConfigError, HotstartError, raise_all

if TYPE_CHECKING:
    from hotstart.config.settings import ModelConfig

_STREAM = {"buffer_size": int}
_DESERIALIZATION = {"num_readers": int, "verify_hash": bool, "plaid_mode": bool, "plaid_mode_buffers": int}
_SIGNED_HERE = "s3_access_key_id, s3_secret_access_key and s3_endpoint beside it, or AWS_* in the environment"


class TensorizerOptions(Struct, frozen=True):
    """Parsed; None: left to the library."""

    name: str = DEFAULT_NAME
    """Of the file, beside config.json."""
    verify_hash: bool = True
    num_readers: int | None = None
    keyfile: str | None = None
    buffer_size: int | None = None
    """Bytes of a download's buffer."""

    @classmethod
    def parse(cls, given: Mapping[str, Any], model: ModelConfig | None = None) -> TensorizerOptions:
        """Without ``model`` the name is not looked for.

        Raises ConfigError, or ProblemsFound with all of them.
        """
        nested = given.get("tensorizer_config", {})
        raise_all(key_problems("tensorizer", nested))
        twice = [{key: given[key], f"tensorizer_config.{key}": nested[key]} for key in nested if key in given]
        given = {**given, **nested}
        stream = given.get("stream_kwargs") or {}
        kwargs = given.get("deserialization_kwargs") or {}
        also = {f"deserialization_kwargs.{key}": value for key, value in kwargs.items()}
        readers = _given(
            {**given, **also}, "concurrency", "num_readers", "deserialization_kwargs.num_readers"
        )
        hashes = _given({**given, **also}, "verify_hash", "deserialization_kwargs.verify_hash")
        problems = [
            *_unknown("stream_kwargs", stream, _STREAM),
            *_unknown("deserialization_kwargs", kwargs, _DESERIALIZATION),
            *(problem for each in twice for problem in _differing(each)),
            *_differing(readers),
            *_differing(hashes),
            *_two_places(given),
        ]
        name = DEFAULT_NAME
        try:
            name = _name(given, model) if model is not None else name
        except HotstartError as error:
            problems.append(error)
        raise_all(problems)
        return cls(
            name=name,
            verify_hash=False not in hashes.values(),
            num_readers=next(iter(readers.values()), None),
            keyfile=given.get("encryption_keyfile"),
            buffer_size=stream.get("buffer_size"),
        )


def _given(options: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: options[key] for key in keys if options.get(key) is not None}


def _differing(values: Mapping[str, Any]) -> list[HotstartError]:
    """Keys of one meaning that say different things."""
    if all(value == next(iter(values.values())) for value in values.values()):
        return []
    return [
        ConfigError(
            f"--model-loader-extra-config has {' and '.join(values)}, which differ", expected="one of them"
        )
    ]


def _two_places(given: Mapping[str, Any]) -> list[HotstartError]:
    uri, directory = given.get("tensorizer_uri"), given.get("tensorizer_dir")
    if not uri or not directory or not os.path.dirname(uri) or _same(os.path.dirname(uri), directory):
        return []
    return _differing({"tensorizer_uri": uri, "tensorizer_dir": directory})


def _name(given: Mapping[str, Any], model: ModelConfig) -> str:
    """The file, which must lie in MODEL; ``%03d`` stands for the rank."""
    uri, directory = given.get("tensorizer_uri"), given.get("tensorizer_dir")
    if uri is None and directory is None:
        return DEFAULT_NAME
    folder, name = (os.path.dirname(uri), os.path.basename(uri)) if uri else (str(directory), DEFAULT_NAME)
    here = model.location or model.path
    if folder and not _same(folder, here):
        raise ConfigError(
            f"--model-loader-extra-config names weights in {folder}, and MODEL is {here or model.model}",
            expected="weights, config.json and tokenizer in one place",
            advice=f"Pass it as MODEL: hotstart serve {folder} --load-format tensorizer",
        )
    try:
        return name % 0 if "%" in name else name
    except (TypeError, ValueError):
        raise ConfigError(
            f"--model-loader-extra-config: tensorizer_uri ends in {name!r}",
            expected="a file's name, with %03d at most for the rank",
        ) from None


def _same(one: str, other: str) -> bool:
    if "://" in one or "://" in other:
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(os.path.expanduser(one)) == os.path.realpath(other)


def _unknown(where: str, given: Any, known: Mapping[str, type]) -> list[HotstartError]:
    problems: list[HotstartError] = []
    for key, value in given.items():
        if (
            key in known
            and type(value) is known[key]
            and (not isinstance(value, int) or isinstance(value, bool) or value > 0)
        ):
            continue
        expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in known.items())
        if where == "stream_kwargs" and key.startswith(("s3_", "force_http")):
            expected = _SIGNED_HERE
        problems.append(
            ConfigError(f"--model-loader-extra-config: {where} cannot have {key!r} so", expected=expected)
        )
    return problems
