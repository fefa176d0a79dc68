"""Prompts of random tokens, by vLLM's rules: lengths, a common beginning, beginnings that repeat.

Sent as text, tokens are not always the same tokens again: two may melt into one, or one fall apart. So a
text is encoded, cut or lengthened until it has the length that was asked for, as vLLM does it. The ids
are drawn each for itself, where vLLM counts upwards from a random one: with a thousand prompts some of
those begin alike, and a prefix cache knows them.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

from hotstart.bench.serving.datasets_tokenizer import Tokenizer
from hotstart.bench.serving.requests import SampleRequest
from hotstart.checkpoint.wording import count
from hotstart.errors import ConfigError

_ATTEMPTS = 10
"""At the length that was asked for; as vLLM."""


class Lengths(NamedTuple):
    """Tokens of random requests, and how far from them each may be, as a share of them."""

    input: int
    output: int
    prefix: int = 0
    input_ratio: float = 0.0
    output_ratio: float = 0.0


class Shaped(NamedTuple):
    """A prompt in the form in which it is sent."""

    prompt: str | list[int]
    ids: list[int]
    surplus: int = 0
    """Tokens more than were asked for; fewer if negative."""


class AsIds:
    """Prompts as ids, for an engine that takes them: lengths are true as they are."""

    special = 0

    def __init__(self, vocabulary: int) -> None:
        self.alphabet: Sequence[int] = range(vocabulary)

    def __call__(self, ids: list[int], dice: random.Random) -> Shaped:
        """The ids themselves."""
        return Shaped(ids, ids)


class AsText:
    """Prompts as text of the wanted number of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.alphabet = tokenizer.alphabet()
        self.special = len(tokenizer.encode(""))
        """Tokens that a server adds to each prompt."""

    def __call__(self, ids: list[int], dice: random.Random) -> Shaped:
        """A text of as many tokens as ``ids``, or as near as was found."""
        wanted = len(ids)
        for attempt in range(_ATTEMPTS + 1):
            text = self._tokenizer.decode(ids)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == wanted or attempt == _ATTEMPTS:
                break
            ids = [*ids[:wanted], *dice.choices(self.alphabet, k=max(0, wanted - len(ids)))]
        return Shaped(text, ids, len(ids) - wanted)


def random_requests(
    number: int, lengths: Lengths, shape: AsIds | AsText, dice: random.Random
) -> list[SampleRequest]:
    """Requests whose lengths are drawn evenly around ``lengths``. Raises ``ConfigError``."""
    within = max(0, lengths.input - shape.special)
    low = math.floor(within * (1 - lengths.input_ratio))
    high = math.ceil(within * (1 + lengths.input_ratio))
    if lengths.prefix + low < 1:
        raise ConfigError(
            f"random prompts of {count(lengths.input, 'token')} could be empty: "
            f"{shape.special} are special ones, and the range goes down to {low}",
            expected="at least one token in the shortest prompt",
            advice="Give a larger --random-input-len, or a smaller --random-range-ratio",
        )
    shortest = max(1, math.floor(lengths.output * (1 - lengths.output_ratio)))
    longest = max(1, math.ceil(lengths.output * (1 + lengths.output_ratio)))
    prefix = _drawn(lengths.prefix, shape, dice)
    surplus = prefix.surplus
    found = []
    for _ in range(number):
        length, output = dice.randint(low, high), dice.randint(shortest, longest)
        shaped = shape([*prefix.ids, *dice.choices(shape.alphabet, k=length)], dice)
        surplus += shaped.surplus
        found.append(SampleRequest(shaped.prompt, len(shaped.ids) + shape.special, output))
    _tell(surplus)
    return found


def repeated_prefixes(
    number: int, prefixes: int, lengths: Lengths, shape: AsIds | AsText, dice: random.Random
) -> list[SampleRequest]:
    """As many requests with each of the ``prefixes``, shuffled. Raises ``ConfigError``."""
    each = number // prefixes
    if not each:
        raise ConfigError(
            f"{number} prompts for {prefixes} prefixes",
            expected="at least one prompt for each",
            advice="Give a larger --num-prompts, or a smaller --prefix-repetition-num-prefixes",
        )
    if each * prefixes < number:
        print(
            f"{each} prompts for each of {prefixes} prefixes: {each * prefixes} of {number}", file=sys.stderr
        )
    found, surplus = [], 0
    for _ in range(prefixes):
        prefix = _drawn(lengths.prefix, shape, dice)
        surplus += prefix.surplus
        for _ in range(each):
            shaped = shape([*prefix.ids, *dice.choices(shape.alphabet, k=lengths.input)], dice)
            surplus += shaped.surplus
            found.append(SampleRequest(shaped.prompt, len(shaped.ids) + shape.special, lengths.output))
    dice.shuffle(found)
    _tell(surplus)
    return found


def _drawn(length: int, shape: AsIds | AsText, dice: random.Random) -> Shaped:
    return shape(dice.choices(shape.alphabet, k=length), dice)


def _tell(surplus: int) -> None:
    if surplus:
        found = f"{count(abs(surplus), 'token')} {'more' if surplus > 0 else 'fewer'}"
        print(
            f"All prompts together have {found} than asked for: as text they fell otherwise", file=sys.stderr
        )
