"""What ``bench latency`` and ``bench throughput`` share: the engine's flags, and an ``LLM`` made of them.

Both take the flags of ``serve`` that concern a model, so that what is measured is what is served;
those of the HTTP side are no flags here.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotstart.config.command import Command
from hotstart.config.flags import Flag, Group, no_effect, refused
from hotstart.config.parse import parse_serve
from hotstart.config.table import GROUPS, MODEL
from hotstart.errors import ConfigError

if TYPE_CHECKING:
    from hotstart.llm import LLM

_OF_A_SERVER = ("http.", "log.")


def command(name: str, summary: str, *groups: Group) -> Command:
    """A command with flags of its own, those of the engine, and those that vLLM's command has besides."""
    known = Group(
        "Known from vLLM",
        no_effect("--disable-log-stats", because="nothing is logged while it is measured"),
        no_effect(
            "--disable-detokenize",
            because="text is always made of the tokens, and its time is part of the figures",
        ),
        refused(
            "--profile",
            because="there is no profiler inside",
            instead="run the command under one: `py-spy record -- hotstart bench …`",
        ),
        refused("--use-beam-search", because="there is no beam search"),
    )
    own = {name for group in (*groups, known) for row in group.rows for name in row.names}
    engine = (Group(group.title, *_of_engine(group.rows, own)) for group in GROUPS)
    return Command(
        name,
        summary,
        (*groups, *(group for group in engine if group.rows), known),
        positional=MODEL,
        config_file="config",
    )


def _of_engine(rows: Sequence[Flag], own: set[str]) -> list[Flag]:
    return [row for row in rows if not row.to.startswith(_OF_A_SERVER) and not own.intersection(row.names)]


def parse(of: Command, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The command's own values, and the settings of the engine by field (``model.dtype``)."""
    parsed = parse_serve(argv, os.environ, command=of)
    for note in parsed.notes:
        print(f"hotstart: {note}", file=sys.stderr)
    own = {to: value for to, value in parsed.values.items() if "." not in to}
    engine = {
        to: value for to, value in parsed.values.items() if "." in to and not to.startswith(_OF_A_SERVER)
    }
    return own, engine


def load(engine: Mapping[str, Any]) -> LLM:
    """The model in this process. Raises the errors of a start."""
    from hotstart.llm import LLM

    settings = {to.partition(".")[2]: value for to, value in engine.items()}
    return LLM(settings.pop("model"), **settings)


def check_fits(llm: LLM, prompt: int, output: int, flags: str) -> None:
    """Raise ``ConfigError`` for a request that would be cut short, and so be measured as less than asked."""
    if prompt + output > llm.max_model_len:
        raise ConfigError(
            f"a prompt of {prompt} tokens and {output} tokens of output are {prompt + output}",
            expected=f"at most {llm.max_model_len}, the context (max_model_len)",
            advice=f"Give less of {flags}, or a larger --max-model-len",
        )


def random_ids(dice: random.Random, vocabulary: int, length: int) -> list[int]:
    """Token ids that are as good as any: what a model makes of them costs the same."""
    return [dice.randrange(vocabulary) for _ in range(length)]
