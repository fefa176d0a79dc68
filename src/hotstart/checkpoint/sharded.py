"""Pre-sharded checkpoints: a rank opens its own files and no others.

Which files there are is known by their names, before any is opened; what they hold, by the headers of
this rank's. Whether that is what a rank of so many must have is for :mod:`hotstart.loading.rank`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hotstart.checkpoint.base import Checkpoint, Skipped
from hotstart.checkpoint.folder import Folder, LocalFolder
from hotstart.checkpoint.layout import merge_headers, read_headers
from hotstart.checkpoint.sharded_names import (
    MOST_PARTS,
    MOST_RANKS,
    PP_PATTERN,
    TP_PATTERN,
    Pattern,
    Rank,
    Shards,
    find_shards,
    pattern_for,
    sizes_of,
)
from hotstart.checkpoint.wording import count, few
from hotstart.errors import HotstartError, ModelError, raise_all

if TYPE_CHECKING:
    from hotstart.checkpoint.remote import ObjectFolder


def open_sharded(
    place: Folder | str, rank: Rank | None = None, pattern: str | None = None, *, said: str = "sharded_state"
) -> Checkpoint:
    """Choose a rank's files and read their headers. ``said``: the ``--load-format``, for messages.

    Tensors have the names that vLLM gives its parameters. Raises ConfigError for a pattern that cannot
    name files, ModelError for absent ranks and parts and for other sizes, StorageError.
    """
    folder = LocalFolder(place) if isinstance(place, str) else place
    rank = rank or Rank()
    if pattern is not None:
        Pattern(pattern).check(rank)
    sizes = _listed(folder, rank, pattern)
    shards = choose_shards(folder.path, sizes, rank, pattern, said=said)
    own = [file.name for file in shards.of(rank)]
    headers, absent, problems = read_headers(folder, own)
    if absent:
        problems.insert(0, ModelError(f"{few(absent)} went from {folder.path} while it was looked at"))
    raise_all(problems)
    return Checkpoint(
        path=folder.path,
        folder=folder,
        files=tuple(header.file for header in headers),
        tensors=merge_headers(headers),
        skipped=_skipped(shards, sizes, own),
    )


def choose_shards(
    place: str, names: Iterable[str], rank: Rank, pattern: str | None = None, *, said: str = "sharded_state"
) -> Shards:
    """The pre-sharded files among the names of what lies at a place, once these fit the rank.

    Raises as :func:`open_sharded` does, but for what needs a file opened.
    """
    shards = _one_pattern(place, names, rank, pattern, said)
    _check_names(place, shards, rank)
    return shards


def _listed(folder: Folder, rank: Rank, pattern: str | None) -> Mapping[str, int]:
    if isinstance(folder, LocalFolder):
        return folder.sizes()
    from hotstart.checkpoint.remote import ObjectFolder

    assert isinstance(folder, ObjectFolder)
    return _asked(folder, rank, pattern) if folder.store.location.is_web else folder.listing()


def _asked(folder: ObjectFolder, rank: Rank, pattern: str | None) -> dict[str, int]:
    """Of a web server, which lists nothing: the rank's parts one by one, and a rank that must not be."""
    known = Pattern(pattern or pattern_for(rank.pp_size))

    def size(tp: int, pp: int, part: int) -> dict[str, int]:
        name = known.write(tp, pp, part)
        fetched = folder.store.fetch(name, 1)
        return {} if fetched is None else {name: fetched.size}

    found: dict[str, int] = {}
    for part in range(MOST_PARTS if "part" in known.fields else 1):
        one = size(rank.tp_rank, rank.pp_rank, part)
        found |= one
        if not one:
            break
    if "tp" in known.fields:
        found |= size(rank.tp_size, rank.pp_rank, 0)
    if "pp" in known.fields:
        found |= size(rank.tp_rank, rank.pp_size, 0)
    return found


def _one_pattern(place: str, names: Iterable[str], rank: Rank, pattern: str | None, said: str) -> Shards:
    """The files of the pattern that was asked for, or of the only one there is."""
    names = [name for name in names if "/" not in name]
    found = find_shards(names, (TP_PATTERN, PP_PATTERN) if pattern is None else (pattern,))
    if len(found) == 1:
        return found[0]
    if found:
        kinds = "; ".join(f"{count(len(each.files), 'file')} of {each.pattern}" for each in found)
        raise ModelError(
            f"{place} holds pre-sharded files of two patterns: {kinds}",
            expected="one checkpoint in a directory",
            advice="Move one of them away, or say which it is: --model-loader-extra-config "
            f'\'{{"pattern": "{found[0].pattern}"}}\'',
        )
    wanted = pattern or pattern_for(rank.pp_size)
    others = find_shards(names)
    plain = any(name.endswith(".safetensors") for name in names)
    if others:
        advice = f"Its files are named {others[0].pattern}: leave the pattern out"
    elif plain:
        advice = (
            "This is a plain checkpoint: leave --load-format out, or write a pre-sharded one by "
            f"hotstart convert sharded {place} DST --tensor-parallel-size {rank.tp_size}"
        )
    else:
        advice = "Copy the weight files there, or say how they are named by pattern"
    raise ModelError(
        f"{place} holds no pre-sharded weight files, which --load-format {said} reads",
        expected=f"files named {wanted}",
        advice=advice,
    )


def _check_names(place: str, shards: Shards, rank: Rank) -> None:
    """What names alone tell: holes, and sizes that are not those of this start."""
    problems: list[HotstartError] = []
    listed = not place.startswith(("http://", "https://"))
    if odd := shards.beyond:
        raise ModelError(
            f"{place} holds {odd.name}, whose name has a number that no checkpoint comes to",
            expected=f"ranks below {MOST_RANKS} and parts below {MOST_PARTS}",
            advice="Move it away; if it was renamed, give it its name back",
        )
    if listed and (absent := shards.absent_ranks(shards.tp_size, shards.pp_size)):
        problems.append(
            ModelError(
                f"{place} holds no files of {count(absent.number, 'rank')} of a checkpoint for "
                f"{sizes_of(shards.tp_size, shards.pp_size)}: {absent}",
                expected="files of every rank",
                advice="Copy them from where the others came from",
            )
        )
    if parts := shards.absent_parts(rank):
        problems.append(
            ModelError(
                f"{place} lacks {count(parts.number, 'part')} of {rank}: {parts}",
                expected=f"every part up to {shards.of(rank)[-1].name}",
                advice="Copy the absent files",
            )
        )
    sizes, asked = (shards.tp_size, shards.pp_size), (rank.tp_size, rank.pp_size)
    if sizes != asked and (listed or sizes > asked):
        raise_all([*problems, wrong_sizes(place, *sizes, rank)])
    raise_all(problems)


def wrong_sizes(path: str, tp_size: int, pp_size: int, rank: Rank) -> ModelError:
    """The error for a checkpoint whose files are for so many ranks, and not for as many as there are."""
    found, asked = sizes_of(tp_size, pp_size), sizes_of(rank.tp_size, rank.pp_size)
    fewer = tp_size * pp_size < rank.tp_size * rank.pp_size
    others = "copy the files of the other ranks" if fewer else f"start with {found}"
    return ModelError(
        f"{path} has pre-sharded files for {found}, and this start has {asked}",
        expected="files for as many ranks as there are",
        advice=f"If files of an earlier conversion lie there too, move them away; otherwise {others}, or "
        f"write files for this start from the plain checkpoint: hotstart convert sharded SRC DST {asked}",
    )


def _skipped(shards: Shards, sizes: Mapping[str, int], own: list[str]) -> tuple[Skipped, ...]:
    ranks = {file.name: f"of rank {file.tp}" for file in shards.files}
    if shards.pp_size > 1:
        ranks = {file.name: f"of rank {file.tp} in stage {file.pp}" for file in shards.files}
    others = [name for name in sizes if name.endswith(".safetensors") and name not in own]
    return tuple(
        Skipped(name, sizes[name], ranks.get(name, "no file of the pre-sharded checkpoint"))
        for name in sorted(others)
    )
