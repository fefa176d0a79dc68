"""The names of pre-sharded weight files: what they say of rank and part, and which sizes they are for.

vLLM writes a file for every rank, cut into parts: ``model-rank-{rank}-part-{part}.safetensors``, or with
stages ``model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors``. Another pattern has the same fields.
No name says how many ranks or parts there are.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from itertools import islice

from msgspec import Struct

from hotstart.errors import ConfigError

LOAD_FORMATS = ("sharded_state", "runai_streamer_sharded")
"""Values of ``--load-format`` that read them."""
TP_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
PP_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"
MOST_RANKS, MOST_PARTS = 4096, 10_000
"""Of a checkpoint; a number beyond is no number of a rank or a part."""
_NAMED = 3
_FIELDS = {"rank": "tp", "tp_rank": "tp", "pp_rank": "pp", "part": "part"}
_SPEC = re.compile(r"(0?[1-9])?d?")
"""Padded numbers, as ``{rank:02d}``."""


class Rank(Struct, frozen=True):
    """Which of how many. The default is the only one."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0

    def __str__(self) -> str:
        stage = f", stage {self.pp_rank} of {self.pp_size}" if self.pp_size > 1 else ""
        return f"rank {self.tp_rank} of {self.tp_size}{stage}"


class ShardName(Struct, frozen=True):
    """One name, read."""

    name: str
    tp: int
    pp: int
    part: int


class Pattern:
    """What names files of a checkpoint have. Raises ConfigError for a text that cannot name them."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise _unusable(text, str(error)) from None
        self.fields: set[str] = set()
        expression = ""
        for literal, field, spec, conversion in pieces:
            expression += re.escape(literal)
            if field is None:
                continue
            if field not in _FIELDS:
                raise _unusable(text, f"it has the field {{{field}}}")
            if conversion or not _SPEC.fullmatch(spec or ""):
                raise _unusable(text, f"{{{field}}} is to be written as {conversion or spec!r}")
            known = _FIELDS[field]
            expression += f"(?P={known})" if known in self.fields else rf"(?P<{known}>\d{{1,9}})"
            self.fields.add(known)
        if "/" in text or not text.endswith(".safetensors"):
            raise _unusable(text, "it names no safetensors file beside config.json")
        if "part" not in self.fields and "tp" not in self.fields and "pp" not in self.fields:
            raise _unusable(text, "all files have one name")
        self._expression = re.compile(expression)

    def read(self, name: str) -> ShardName | None:
        """What a file's name says; None: it has another pattern."""
        found = self._expression.fullmatch(name)
        if found is None:
            return None
        shard = ShardName(name, *(int(found[f]) if f in self.fields else 0 for f in ("tp", "pp", "part")))
        # As numbers are written by the pattern: 01 is no 1.
        return shard if self.write(shard.tp, shard.pp, shard.part) == name else None

    def write(self, tp: int, pp: int, part: int) -> str:
        """The name of a rank's part."""
        return self.text.format(rank=tp, tp_rank=tp, pp_rank=pp, part=part)

    def check(self, rank: Rank) -> None:
        """Raise ConfigError where two of the ranks would have one name."""
        if rank.tp_size > 1 and "tp" not in self.fields:
            raise _unusable(self.text, f"{rank.tp_size} ranks would read the same files", "{rank}")
        if rank.pp_size > 1 and "pp" not in self.fields:
            raise _unusable(self.text, f"{rank.pp_size} stages would read the same files", "{pp_rank}")

    def files_of(self, rank: Rank) -> str:
        """What a rank's files are called, for messages."""
        text = re.sub(r"\{part[^}]*\}", "*", self.text)
        return text.format(rank=rank.tp_rank, tp_rank=rank.tp_rank, pp_rank=rank.pp_rank)


class Absent(Struct, frozen=True):
    """Files that are not there; how many a name of a file alone makes them is no reason to list them."""

    number: int
    names: tuple[str, ...]
    """Of the first few."""

    def __bool__(self) -> bool:
        return self.number > 0

    def __str__(self) -> str:
        more = self.number - len(self.names)
        return ", ".join(self.names) + (f" and {more} more" if more else "")


class Shards(Struct, frozen=True):
    """The pre-sharded files of one pattern that lie in a folder."""

    pattern: str
    files: tuple[ShardName, ...]

    @property
    def tp_size(self) -> int:
        """By the highest rank there is."""
        return 1 + max(file.tp for file in self.files)

    @property
    def pp_size(self) -> int:
        """By the highest stage there is."""
        return 1 + max(file.pp for file in self.files)

    def of(self, rank: Rank) -> list[ShardName]:
        """A rank's own files, by part."""
        own = (file for file in self.files if (file.tp, file.pp) == (rank.tp_rank, rank.pp_rank))
        return sorted(own, key=lambda file: file.part)

    @property
    def beyond(self) -> ShardName | None:
        """A file whose name has a number that no checkpoint comes to; None: there is none."""
        names = (
            file for file in self.files if max(file.tp, file.pp) >= MOST_RANKS or file.part >= MOST_PARTS
        )
        return next(names, None)

    def absent_ranks(self, tp_size: int, pp_size: int) -> Absent:
        """The files of ranks that have none, out of so many."""
        pattern, there = Pattern(self.pattern), {(file.tp, file.pp) for file in self.files}
        every = (Rank(tp_size, tp, pp_size, pp) for pp in range(pp_size) for tp in range(tp_size))
        absent = (pattern.files_of(rank) for rank in every if (rank.tp_rank, rank.pp_rank) not in there)
        return Absent(tp_size * pp_size - len(there), tuple(islice(absent, _NAMED)))

    def absent_parts(self, rank: Rank) -> Absent:
        """A rank's parts that lie before others."""
        parts = {file.part for file in self.of(rank)}
        pattern, last = Pattern(self.pattern), max(parts, default=-1)
        absent = (
            pattern.write(rank.tp_rank, rank.pp_rank, part) for part in range(last) if part not in parts
        )
        return Absent(last + 1 - len(parts), tuple(islice(absent, _NAMED)))


def pattern_for(stages: int) -> str:
    """vLLM's own, for so many stages."""
    return PP_PATTERN if stages > 1 else TP_PATTERN


def find_shards(names: Iterable[str], patterns: Sequence[str] = (TP_PATTERN, PP_PATTERN)) -> list[Shards]:
    """Those of each pattern, of which there are any."""
    names = list(names)
    found = []
    for text in patterns:
        pattern = Pattern(text)
        files = tuple(shard for name in names if (shard := pattern.read(name)) is not None)
        if files:
            found.append(Shards(text, files))
    return found


def sizes_of(tp_size: int, pp_size: int) -> str:
    """As the flags have them."""
    stages = f" --pipeline-parallel-size {pp_size}" if pp_size > 1 else ""
    return f"--tensor-parallel-size {tp_size}{stages}"


def _unusable(text: str, found: str, needed: str = "") -> ConfigError:
    return ConfigError(
        f"--model-loader-extra-config: the pattern {text!r} cannot be used: {found}",
        expected=f"a name with {needed}"
        if needed
        else "a file's name with {rank} or {tp_rank}, {pp_rank} where there are stages, and {part}, "
        "that ends in .safetensors",
        advice=f"Leave it out for {TP_PATTERN}, and {PP_PATTERN} where there are stages",
    )
