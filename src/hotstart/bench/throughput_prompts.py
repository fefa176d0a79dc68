"""The requests of ``bench throughput``: those of ``bench serve``, by the flags of vLLM's own command.

Random prompts stay token ids, which the Python API takes as they are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hotstart.bench.serving.datasets_files import Choice, conversation_requests
from hotstart.bench.serving.datasets_random import AsIds, Lengths, random_requests

if TYPE_CHECKING:
    from hotstart.bench.serving.requests import SampleRequest
    from hotstart.llm import LLM

SHAREGPT, RANDOM = "sharegpt", "random"
_OUTPUT = 128
"""Tokens of an answer to a random prompt, unless another number is given."""


def requests_of(
    llm: LLM, values: dict[str, Any], conversations: Sequence[tuple[str, str]], seed: int
) -> list[SampleRequest]:
    """As many as ``values["num_prompts"]``, or fewer with ``no_oversample``. Raises ``ConfigError``."""
    dice, number = random.Random(seed), values["num_prompts"]
    if values["dataset_name"] == RANDOM:
        lengths = Lengths(
            values.get("random_input_len") or values["input_len"],
            values.get("random_output_len") or values.get("output_len") or _OUTPUT,
            values["prefix_len"],
            values["range_ratio"],
            values["range_ratio"],
        )
        return random_requests(number, lengths, AsIds(llm.vocab_size), dice)
    choice = Choice(number, values["dataset_path"], oversample=not values.get("no_oversample"))
    encode = llm.get_tokenizer().encode
    return conversation_requests(conversations, encode, choice, values.get("output_len"), dice)
