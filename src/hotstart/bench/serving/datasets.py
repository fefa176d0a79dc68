"""The requests of ``bench serve``: vLLM's datasets of text, with its flags.

Every run has a seed of its own, unless one is given: a server remembers the beginnings of prompts, and
the same prompts again would measure its memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hotstart.bench.serving.datasets_files import (
    SHAREGPT_FILE,
    conversation_requests,
    find_sharegpt,
    line_requests,
    read_lines,
    read_sharegpt,
)
from hotstart.bench.serving.datasets_files import (
    Choice as Taken,
)
from hotstart.bench.serving.datasets_random import AsText, Lengths, random_requests, repeated_prefixes
from hotstart.bench.serving.datasets_tokenizer import Tokenizer
from hotstart.bench.serving.requests import SampleRequest
from hotstart.config.flags import Group, flag, no_effect, refused
from hotstart.config.values import Choice, Kind, Number, Text, Whole, parse_json
from hotstart.errors import ConfigError

RANDOM, SHAREGPT, CUSTOM, PREFIX_REPETITION = "random", "sharegpt", "custom", "prefix_repetition"
NAMES = (RANDOM, SHAREGPT, CUSTOM, PREFIX_REPETITION)
_OTHERS = (
    "hf", "burstgpt", "spec_bench", "speed_bench", "timed_trace",
    "random-mm", "random-rerank", "custom_image", "custom_audio",
)  # fmt: skip
_NOT_HERE = "prompts are random tokens, ShareGPT's conversations or lines of a file"
_INSTEAD = 'write the prompts to a file, {"prompt": "…"} a line: --dataset-name custom --dataset-path FILE'


class RangeRatio(Kind):
    """``0.2``, or JSON with a share for ``input`` and one for ``output``; always both: ``(0.2, 0.2)``."""

    metavar = "X"
    expects = 'a share from 0 to 0.999, or {"input": 0.3, "output": 0.5}'

    def __init__(self) -> None:
        self._share = Number(0, 0.999)

    def parse(self, text: str) -> object:
        """The share for prompts, and for answers."""
        if not text.lstrip().startswith("{"):
            share = self._share.parse(text)
            return share, share
        shares = parse_json(text)
        if not isinstance(shares, dict) or set(shares) != {"input", "output"}:
            raise ValueError
        return tuple(self._share.parse(str(shares[name])) for name in ("input", "output"))

    def convert(self, value: object) -> object:
        """A number or a mapping of a YAML file."""
        if isinstance(value, dict):
            value = msgspec.json.encode(value).decode()
        return self.parse(str(value))


def groups() -> tuple[Group, ...]:
    """The flags of the datasets; ``--seed`` and ``--tokenizer`` are the command's."""
    return (_CHOICE, _LENGTHS, _NOT_MEASURED)


def samples(options: Mapping[str, Any], tokenizer: Tokenizer) -> list[SampleRequest]:
    """The requests, by the values of :func:`groups` and ``seed``. Raises as :func:`dataset`."""
    return dataset(options)(tokenizer)


def dataset(options: Mapping[str, Any]) -> Callable[[Tokenizer], list[SampleRequest]]:
    """Read and check what can be without a tokenizer; what is returned makes the requests.

    Raises ``ConfigError``, ``StorageError``.
    """
    name = options["dataset_name"]
    path = options.get("dataset_path")
    if path is not None and name in (RANDOM, PREFIX_REPETITION):
        raise ConfigError(
            f"--dataset-path {path} is given, and --dataset-name {name} reads no file",
            advice=f"Leave the path out, or give --dataset-name {SHAREGPT} or {CUSTOM}",
        )
    if options["num_prompts"] < 1 and name != CUSTOM:
        raise ConfigError(
            f"--num-prompts is {options['num_prompts']}",
            expected=f"1 or more; only with --dataset-name {CUSTOM} 0 means all",
        )
    make = {RANDOM: _random, SHAREGPT: _sharegpt, CUSTOM: _custom, PREFIX_REPETITION: _repetition}[name](
        options
    )

    def made(tokenizer: Tokenizer) -> list[SampleRequest]:
        found = make(tokenizer, random.Random(options["seed"]))
        prefix = options.get("request_id_prefix", "")
        return [
            msgspec.structs.replace(request, request_id=f"{prefix}{number}")
            for number, request in enumerate(found)
        ]

    return made


_Make = Callable[[Tokenizer, random.Random], list[SampleRequest]]


def _random(options: Mapping[str, Any]) -> _Make:
    asked, answered = options["random_range_ratio"]
    lengths = Lengths(
        options.get("input_len") or options["random_input_len"],
        options.get("output_len") or options["random_output_len"],
        options["random_prefix_len"],
        asked,
        answered,
    )
    number = options["num_prompts"]
    return lambda tokenizer, dice: random_requests(number, lengths, AsText(tokenizer), dice)


def _repetition(options: Mapping[str, Any]) -> _Make:
    lengths = Lengths(
        options["prefix_repetition_suffix_len"],
        options.get("output_len") or options["prefix_repetition_output_len"],
        options["prefix_repetition_prefix_len"],
    )
    number, prefixes = options["num_prompts"], options["prefix_repetition_num_prefixes"]
    return lambda tokenizer, dice: repeated_prefixes(number, prefixes, lengths, AsText(tokenizer), dice)


def _sharegpt(options: Mapping[str, Any]) -> _Make:
    path = find_sharegpt(options.get("dataset_path"))
    conversations = read_sharegpt(path)
    output = options.get("output_len") or options.get("sharegpt_output_len")
    choice = _taken(options, path, options["num_prompts"])
    return lambda tokenizer, dice: conversation_requests(
        conversations, tokenizer.encode, choice, output, dice
    )


def _custom(options: Mapping[str, Any]) -> _Make:
    path = options.get("dataset_path")
    prompts = read_lines(path)
    output = options.get("output_len") or options["custom_output_len"]
    choice = _taken(
        options, str(path), options["num_prompts"] if options["num_prompts"] > 0 else len(prompts)
    )
    # In a chat the server puts the prompt into the template: twice would be once too often.
    as_is = options.get("skip_chat_template") or str(options.get("backend", "")).endswith("-chat")
    template = None if as_is else options.get("chat_template_kwargs") or {}
    return lambda tokenizer, dice: line_requests(
        prompts, tokenizer, choice, None if output == -1 else output, template, dice
    )


def _taken(options: Mapping[str, Any], path: str, number: int) -> Taken:
    return Taken(number, path, not options.get("no_oversample"), not options.get("disable_shuffle"))


_CHOICE = Group(
    "Which prompts",
    flag(
        "--dataset-name",
        to="dataset_name",
        kind=Choice(*NAMES, *_OTHERS, metavar="{" + ",".join(NAMES) + "}"),
        default=RANDOM,
        only=NAMES,
        because=_NOT_HERE,
        instead=_INSTEAD,
        help="random tokens; ShareGPT's conversations; lines of a file; random tokens behind few beginnings",
    ),
    flag(
        "--dataset-path",
        to="dataset_path",
        kind=Text("FILE"),
        help=f"of sharegpt, a JSON file (default: {SHAREGPT_FILE} here); of custom, JSON by the line",
    ),
    flag(
        "--num-prompts",
        to="num_prompts",
        kind=Whole(-1),
        default=1000,
        help="requests; with custom, 0 means every line once",
    ),
    flag(
        "--no-oversample",
        to="no_oversample",
        help="do not repeat prompts where a file has fewer than --num-prompts",
    ),
    flag("--disable-shuffle", to="disable_shuffle", help="take what is in a file in its order"),
    flag(
        "--skip-chat-template",
        to="skip_chat_template",
        help="send the prompts of custom as they are to a completions endpoint",
    ),
)
_LENGTHS = Group(
    "Lengths, in tokens",
    flag("--input-len", to="input_len", kind=Whole(1), help="in place of --random-input-len"),
    flag("--output-len", to="output_len", kind=Whole(1), help="of every answer, whatever the dataset"),
    flag(
        "--random-input-len",
        to="random_input_len",
        kind=Whole(0),
        default=1024,
        help="of a prompt, without --random-prefix-len",
    ),
    flag("--random-output-len", to="random_output_len", kind=Whole(1), default=128, help="of an answer"),
    flag(
        "--random-prefix-len",
        to="random_prefix_len",
        kind=Whole(0),
        default=0,
        help="in front of every random prompt, the same in all",
    ),
    flag(
        "--random-range-ratio",
        to="random_range_ratio",
        kind=RangeRatio(),
        default=(0.0, 0.0),
        help='0.2: from 0.8 to 1.2 of what is asked; or {"input": 0.3, "output": 0.5}',
    ),
    flag(
        "--sharegpt-output-len",
        to="sharegpt_output_len",
        kind=Whole(1),
        help="of an answer; default: as long as the conversation's",
    ),
    flag(
        "--custom-output-len",
        to="custom_output_len",
        kind=Whole(1, words={"-1": -1}),
        default=256,
        help='of an answer; -1: as "output_tokens" of the line says',
    ),
    flag(
        "--prefix-repetition-prefix-len",
        to="prefix_repetition_prefix_len",
        kind=Whole(0),
        default=256,
        help="of each beginning",
    ),
    flag(
        "--prefix-repetition-suffix-len",
        to="prefix_repetition_suffix_len",
        kind=Whole(1),
        default=256,
        help="behind it, other ones in each prompt",
    ),
    flag(
        "--prefix-repetition-num-prefixes",
        to="prefix_repetition_num_prefixes",
        kind=Whole(1),
        default=10,
        help="beginnings; prompts are divided evenly among them",
    ),
    flag(
        "--prefix-repetition-output-len",
        to="prefix_repetition_output_len",
        kind=Whole(1),
        default=128,
        help="of an answer",
    ),
)
_NOT_MEASURED = Group(
    "Datasets of vLLM that are not here",
    no_effect("--trust-remote-code", because="no code comes with a dataset"),
    no_effect("--no-stream", because="files are read whole"),
    *(
        refused(name, kind=Text(), because=_NOT_HERE, instead=_INSTEAD)
        for name in (
            "--hf-name",
            "--hf-subset",
            "--hf-split",
            "--hf-output-len",
            "--spec-bench-output-len",
            "--spec-bench-category",
        )
    ),
    refused("--enable-multimodal-chat", because="prompts are text"),
    refused(
        "--random-batch-size",
        kind=Whole(1),
        only=(1,),
        because="answers are measured, no embeddings",
    ),
)
