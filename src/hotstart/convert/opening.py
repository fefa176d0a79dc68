"""What weights a model has to convert: plain ones, or files for ranks or of Tensorizer's to join."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from msgspec.structs import replace

from hotstart.checkpoint.base import Checkpoint
from hotstart.checkpoint.files import CONFIG, read_json
from hotstart.checkpoint.folder import Folder, LocalFolder
from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.safetensors import DTYPE_BITS
from hotstart.checkpoint.sharded import open_sharded
from hotstart.checkpoint.sharded_names import Rank, find_shards
from hotstart.checkpoint.tensorizer import DEFAULT_NAME, RANK_NAME, absent_file, open_tensorizer
from hotstart.checkpoint.wording import count, few
from hotstart.convert.joining import Joined, join
from hotstart.convert.planned import Planned, unchanged
from hotstart.convert.tensorizer_source import DECRYPT, TensorizerFolder
from hotstart.errors import ConfigError, ModelError
from hotstart.models.fused_names import is_fused

_RANKED = re.compile(r"model-rank-(\d{3,4})\.tensors")


def open_weights(folder: Folder, *, keyfile: str | None = None, joins: bool = True) -> Joined:
    """Read headers, and of what ranks hold alike the bytes.

    ``keyfile``: a Tensorizer file is decrypted with it. Without ``joins`` only plain weights are taken.
    Raises ConfigError, ModelError and StorageError.
    """
    shown = folder.path
    try:
        checkpoint = open_checkpoint(folder)
    except ModelError as error:
        shards, tensors = _others(folder)
        if not shards and not tensors:
            raise
        kind = "Tensorizer files" if tensors and not shards else "files for ranks"
        if not joins:
            raise ModelError(
                f"{shown} holds {kind} ({(shards or tensors)[0]} among them)",
                expected="a plain checkpoint, which this conversion reads",
                advice=f"Write one first: hotstart convert safetensors {shown} DST",
            ) from error
    else:
        if keyfile is not None:
            raise _no_key_needed(shown, keyfile)
        refs = sorted(checkpoint.tensors.values(), key=lambda ref: (ref.file, ref.offset, ref.name))
        return Joined(checkpoint, tuple(map(unchanged, refs)))
    if shards and tensors:
        raise ModelError(
            f"{shown} holds files for ranks ({shards[0]}) and Tensorizer files ({tensors[0]})",
            expected="one checkpoint in a directory",
            advice="Move one of them away",
        )
    if tensors:
        return _tensorizer(folder, tensors, keyfile)
    if keyfile is not None:
        raise _no_key_needed(shown, keyfile)
    (found, *more) = find_shards(shards)
    sizes = (found.tp_size, found.pp_size)
    if more:
        sizes = (1, 1)  # opening it says what is wrong
    ranks = [Rank(sizes[0], tp, sizes[1], pp) for pp in range(sizes[1]) for tp in range(sizes[0])]
    return join(folder, _config(folder), [(rank, open_sharded(folder, rank)) for rank in ranks], shown)


def _no_key_needed(shown: str, keyfile: str) -> ConfigError:
    return ConfigError(
        f"{DECRYPT} {keyfile} is for Tensorizer files, and {shown} holds none that are read",
        expected=f"an encrypted Tensorizer file, or no {DECRYPT}",
    )


def _others(folder: Folder) -> tuple[list[str], list[str]]:
    """Names of files for ranks, and of Tensorizer files."""
    names: Sequence[str]
    if isinstance(folder, LocalFolder):
        names = list(folder.sizes())
    else:
        from hotstart.checkpoint.remote import ObjectFolder

        assert isinstance(folder, ObjectFolder)
        if folder.store.location.is_web:  # it lists nothing
            names = [DEFAULT_NAME] if folder.store.fetch(DEFAULT_NAME, 1) is not None else []
        else:
            names = list(folder.listing())
    names = sorted(name for name in names if "/" not in name)
    shards = [file.name for found in find_shards(names) for file in found.files]
    return shards, [name for name in names if name.endswith(".tensors")]


def _tensorizer(folder: Folder, names: Sequence[str], keyfile: str | None) -> Joined:
    """Of one file, whatever it is called, or of one for each rank."""
    shown = folder.path
    ranked = {int(found[1]): name for name in names if (found := _RANKED.fullmatch(name))}
    if DEFAULT_NAME in names:
        chosen = [DEFAULT_NAME]
    elif ranked:
        chosen = [RANK_NAME % rank for rank in range(1 + max(ranked))]
        if absent := [name for name in chosen if name not in names]:
            raise ModelError(
                f"{shown} lacks {count(len(absent), 'Tensorizer file')}: {few(absent)}",
                expected="a file of each rank",
                advice="Copy them from where the others came from",
            )
    elif len(names) == 1:
        chosen = list(names)
    else:
        raise absent_file(shown, names, DEFAULT_NAME)
    reads = TensorizerFolder(folder, keyfile)
    opened = []
    for name in chosen:
        checkpoint = open_tensorizer(folder, name, keyfile=keyfile, said=DECRYPT)
        reads.add(checkpoint)
        opened.append(checkpoint)
    if len(opened) == 1 and not any(map(is_fused, opened[0].tensors)):
        return Joined(replace(opened[0], folder=reads), _as_they_are(opened[0], shown))
    ranks = [(Rank(len(opened), tp), replace(each, folder=reads)) for tp, each in enumerate(opened)]
    return join(reads, _config(folder), ranks, shown)


def _as_they_are(checkpoint: Checkpoint, shown: str) -> tuple[Planned, ...]:
    """Tensors under a family's own names."""
    refs = sorted(checkpoint.tensors.values(), key=lambda ref: ref.offset)
    if strange := [ref for ref in refs if ref.dtype not in DTYPE_BITS]:
        raise ModelError(
            f"{strange[0].name} in {shown} is stored as {strange[0].dtype}, which safetensors does not know",
            expected=f"one of {', '.join(DTYPE_BITS)}",
        )
    return tuple(map(unchanged, refs))


def _config(folder: Folder) -> dict[str, object]:
    return read_json(os.path.join(folder.small_files, CONFIG), shown=f"{folder.path}/{CONFIG}")
