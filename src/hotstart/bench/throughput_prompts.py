"""The requests of ``bench throughput``: random tokens, or conversations in ShareGPT's JSON.

Lengths, filters and repetition are those of ``vllm bench throughput``.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hotstart.bench.in_process import random_ids
from hotstart.checkpoint.wording import count
from hotstart.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from hotstart.llm import LLM

SHAREGPT, RANDOM = "sharegpt", "random"
_OUTPUT = 128
"""Tokens of an answer to a random prompt, unless another number is given."""
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048
"""Tokens: conversations outside are passed over."""


class Request(NamedTuple):
    """A prompt, and how much is to come of it."""

    prompt: str | list[int]
    length: int
    """Tokens of the prompt."""
    output: int
    """Tokens of the answer."""


def requests_of(
    llm: LLM, values: dict[str, Any], conversations: Sequence[tuple[str, str]], seed: int
) -> list[Request]:
    """As many as ``values["num_prompts"]``, or fewer with ``no_oversample``. Raises ``ConfigError``."""
    dice = random.Random(seed)
    if values["dataset_name"] == RANDOM:
        return _random(llm, values, dice)
    return _sampled(llm, values, conversations, dice)


def _random(llm: LLM, values: dict[str, Any], dice: random.Random) -> list[Request]:
    prompt = values.get("random_input_len") or values["input_len"]
    output = values.get("random_output_len") or values.get("output_len") or _OUTPUT
    prefix = random_ids(dice, llm.vocab_size, values["prefix_len"])

    def near(length: int) -> int:
        low = math.floor(length * (1 - values["range_ratio"]))
        return dice.randint(max(1, low), math.ceil(length * (1 + values["range_ratio"])))

    found = []
    for _ in range(values["num_prompts"]):
        ids = prefix + random_ids(dice, llm.vocab_size, near(prompt))
        found.append(Request(ids, len(ids), near(output)))
    return found


def _sampled(
    llm: LLM, values: dict[str, Any], conversations: Sequence[tuple[str, str]], dice: random.Random
) -> list[Request]:
    shuffled, wanted = list(conversations), values["num_prompts"]
    dice.shuffle(shuffled)
    encode = llm.get_tokenizer().encode
    found: list[Request] = []
    for question, answer in shuffled:
        if len(found) == wanted:
            break
        prompt = len(encode(question))
        output = values.get("output_len") or len(encode(answer))
        # A length that was asked for is no reason to leave a conversation out for being short.
        long_enough = prompt >= _SHORTEST and (bool(values.get("output_len")) or output >= _SHORTEST)
        if long_enough and prompt <= _LONGEST_PROMPT and prompt + output <= _LONGEST:
            found.append(Request(question, prompt, output))
    if not found:
        raise ConfigError(
            f"none of {len(conversations)} conversations of {values['dataset_path']} has a fitting length",
            expected=f"prompts of {_SHORTEST} to {_LONGEST_PROMPT} tokens, {_LONGEST} with the answer",
        )
    if len(found) < wanted and not values.get("no_oversample"):
        there = count(len(found), "conversation")
        print(f"{there} of a fitting length, taken again to make {wanted}", file=sys.stderr)
        found += dice.choices(found, k=wanted - len(found))
    return found


def read_dataset(path: str) -> list[tuple[str, str]]:
    """The first two turns of each conversation in a file of ShareGPT's form.

    Raises ``StorageError`` for a file that cannot be read, ``ConfigError`` for one of another form.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
    except OSError as error:
        raise StorageError(f"--dataset-path {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path} is no JSON: {error}", expected=_FORM) from None
    try:
        turns = [entry["conversations"][:2] for entry in entries if len(entry.get("conversations", ())) >= 2]
        found = [(str(first["value"]), str(second["value"])) for first, second in turns]
    except (AttributeError, KeyError, TypeError):
        found = []
    if not found:
        raise ConfigError(f"--dataset-path {path} holds no conversation of two turns", expected=_FORM)
    return found


_FORM = 'ShareGPT\'s form: [{"conversations": [{"value": "question"}, {"value": "answer"}]}, …]'
