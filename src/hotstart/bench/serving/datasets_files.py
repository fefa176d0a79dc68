"""Prompts from files: conversations in ShareGPT's JSON, and lines of JSON with a prompt each.

Filters, shuffling and repetition are vLLM's.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from hotstart.bench.serving.datasets_tokenizer import Tokenizer
from hotstart.bench.serving.requests import SampleRequest
from hotstart.checkpoint.wording import count
from hotstart.errors import ConfigError, StorageError

SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
"""What ``sharegpt`` takes from the working directory without a path."""
_SHAREGPT_ADDRESS = (
    "https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/main/" + SHAREGPT_FILE
)
_CONVERSATIONS = 'ShareGPT\'s form: [{"conversations": [{"value": "question"}, {"value": "answer"}]}, …]'
_LINES = 'a line for each prompt, such as {"prompt": "What is a tensor?", "output_tokens": 100}'
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048
"""Tokens: conversations outside are passed over."""


T = TypeVar("T")


class Prompt(NamedTuple):
    """A line of a file."""

    text: str
    output: int | None
    """Tokens of the answer, where the line says it."""


def find_sharegpt(path: str | None) -> str:
    """The file of conversations. Raises ``ConfigError`` with the way to get one."""
    if path is None and not os.path.exists(SHAREGPT_FILE):
        raise ConfigError(
            f"there is no --dataset-path, and no {SHAREGPT_FILE} in {os.getcwd()}",
            expected="a file of conversations in ShareGPT's form",
            advice=f"Get the usual one: `wget {_SHAREGPT_ADDRESS}`",
        )
    return path or SHAREGPT_FILE


def read_sharegpt(path: str) -> list[tuple[str, str]]:
    """The first two turns of each conversation that has two. Raises ``StorageError``, ``ConfigError``."""
    content = _read(path, _CONVERSATIONS)
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--dataset-path {path} is no JSON: {error}", expected=_CONVERSATIONS) from None
    try:
        turns = [entry["conversations"][:2] for entry in entries if len(entry.get("conversations", ())) >= 2]
        found = [(str(first["value"]), str(second["value"])) for first, second in turns]
    except (AttributeError, KeyError, TypeError):
        found = []
    if not found:
        raise ConfigError(
            f"--dataset-path {path} holds no conversation of two turns", expected=_CONVERSATIONS
        )
    return found


def read_lines(path: str | None) -> list[Prompt]:
    """The prompts of a file of ``custom``. Raises ``StorageError``, ``ConfigError`` with the line."""
    if path is None:
        raise ConfigError("--dataset-name custom has no --dataset-path", expected=f"a file with {_LINES}")
    found = []
    for number, line in enumerate(_read(path, _LINES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _bad_line(path, number, f"is no JSON: {error}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise _bad_line(path, number, 'has no "prompt" that is a text')
        output = entry.get("output_tokens")
        if output is not None and (isinstance(output, bool) or not isinstance(output, int) or output < 1):
            raise _bad_line(
                path, number, f'says "output_tokens": {json.dumps(output)[:80]}, which is no number'
            )
        found.append(Prompt(entry["prompt"], output))
    if not found:
        raise ConfigError(f"--dataset-path {path} holds no prompt", expected=_LINES)
    return found


def _read(path: str, form: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = file.read()
    except OSError as error:
        raise StorageError(
            f"--dataset-path {path} cannot be read: {error.strerror or error}",
            advice="Name a file that exists and that you may read",
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--dataset-path {path} is no text in UTF-8: {error}", expected=form) from None
    if not content.strip():
        raise ConfigError(f"--dataset-path {path} is empty", expected=form)
    return content


def _bad_line(path: str, number: int, found: str) -> ConfigError:
    return ConfigError(f"--dataset-path {path}, line {number} {found}", expected=_LINES)


class Choice(NamedTuple):
    """How many requests are taken of what a file holds, and how."""

    number: int
    path: str
    oversample: bool = True
    """Repeat some where there are fewer than ``number``."""
    shuffle: bool = True


def conversation_requests(
    conversations: Sequence[tuple[str, str]],
    encode: Callable[[str], Sequence[int]],
    choice: Choice,
    output: int | None,
    dice: random.Random,
) -> list[SampleRequest]:
    """First questions; answers are as long as those given, or ``output`` tokens. Raises ``ConfigError``."""
    found: list[SampleRequest] = []
    for question, answer in _in_order(conversations, choice, dice):
        if len(found) == choice.number:
            break
        prompt = len(encode(question))
        wanted = output or len(encode(answer))
        # A length that was asked for is no reason to leave a conversation out for being short.
        long_enough = prompt >= _SHORTEST and (bool(output) or wanted >= _SHORTEST)
        if long_enough and prompt <= _LONGEST_PROMPT and prompt + wanted <= _LONGEST:
            found.append(SampleRequest(question, prompt, wanted))
    if not found:
        raise ConfigError(
            f"none of {count(len(conversations), 'conversation')} in {choice.path} has a fitting length",
            expected=f"prompts of {_SHORTEST} to {_LONGEST_PROMPT} tokens, {_LONGEST} with the answer",
        )
    return _repeated(found, "conversation of a fitting length", choice, dice)


def line_requests(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    choice: Choice,
    output: int | None,
    template: Mapping[str, object] | None,
    dice: random.Random,
) -> list[SampleRequest]:
    """Prompts of ``custom``; ``output`` None: as long as each line says. Raises ``ConfigError``.

    ``template``: prompts are put into the model's chat template with these arguments; None: sent as they are.
    """
    found: list[SampleRequest] = []
    bare = False
    for prompt in list(_in_order(prompts, choice, dice))[: choice.number]:
        wanted = output or prompt.output
        if wanted is None:
            raise ConfigError(
                f'a line of {choice.path} has no "output_tokens", and --custom-output-len is -1',
                expected=_LINES,
                advice="Give --custom-output-len N for all lines",
            )
        text = tokenizer.conversation(prompt.text, template) if template is not None else prompt.text
        bare = bare or text is None
        text = prompt.text if text is None else text
        found.append(SampleRequest(text, len(tokenizer.encode(text)), wanted))
    if bare:
        print("There is no chat template: prompts are sent as they are", file=sys.stderr)
    return _repeated(found, "prompt", choice, dice)


def _in_order(of: Sequence[T], choice: Choice, dice: random.Random) -> list[T]:
    found = list(of)
    if choice.shuffle:
        dice.shuffle(found)
    return found


def _repeated(
    found: list[SampleRequest], noun: str, choice: Choice, dice: random.Random
) -> list[SampleRequest]:
    missing = choice.number - len(found)
    if missing > 0 and choice.oversample:
        first, _, rest = noun.partition(" ")
        there = f"{count(len(found), first)} {rest}".rstrip()
        print(f"{there}, taken again to make {choice.number}", file=sys.stderr)
        found += [msgspec.structs.replace(request) for request in dice.choices(found, k=missing)]
    return found
