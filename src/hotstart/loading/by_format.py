"""Which files of a folder are read, and what a model finds in them, by ``--load-format``. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from glob import escape
from typing import TYPE_CHECKING

from hotstart.checkpoint.layout import open_checkpoint
from hotstart.checkpoint.sharded_names import LOAD_FORMATS, Rank
from hotstart.loading.match import Matched, match

if TYPE_CHECKING:
    from hotstart.checkpoint.base import Checkpoint
    from hotstart.checkpoint.folder import Folder
    from hotstart.checkpoint.hub import Files
    from hotstart.config.settings import Config
    from hotstart.models.spec import WeightSpec


def open_weights(folder: Folder, config: Config) -> Checkpoint:
    """Choose the weight files and read their headers. Raises ModelError, StorageError and ConfigError."""
    from hotstart.loading.loader_check import check_keys

    load = config.load
    check_keys(config)  # hotstart check goes on when it has found wrong ones
    if load.load_format in LOAD_FORMATS:
        from hotstart.checkpoint.sharded import open_sharded

        pattern = load.model_loader_extra_config.get("pattern")
        return open_sharded(folder, rank_of(config), pattern, said=load.load_format)
    if load.load_format == "tensorizer":
        from hotstart.checkpoint.tensorizer import open_tensorizer
        from hotstart.loading.tensorizer_options import TensorizerOptions

        options = TensorizerOptions.parse(load.model_loader_extra_config, config.model)
        return open_tensorizer(folder, options.name, keyfile=options.keyfile)
    return open_checkpoint(folder, ignore_index=config.model.ignore_index)


def hub_files(config: Config) -> Files:
    """What to download of a model on the hub. The keys of the loader have been checked."""
    from hotstart.checkpoint.hub import ALLOW, SMALL, Files

    load, place = config.load, config.model.model
    if load.load_format == "dummy":
        return Files(SMALL)
    if load.load_format == "tensorizer":
        from hotstart.checkpoint.tensorizer import absent_file
        from hotstart.loading.tensorizer_options import TensorizerOptions

        name = TensorizerOptions.parse(load.model_loader_extra_config, config.model).name

        def choose_file(names: Sequence[str]) -> Sequence[str]:
            if name not in names:
                raise absent_file(place, names, name)
            return [name]

        return Files((*SMALL, escape(name)), choose_file)
    if load.load_format in LOAD_FORMATS:
        from hotstart.checkpoint.sharded import choose_shards

        rank, pattern = rank_of(config), load.model_loader_extra_config.get("pattern")

        def choose_own(names: Sequence[str]) -> Sequence[str]:
            shards = choose_shards(place, names, rank, pattern, said=load.load_format)
            return [file.name for file in shards.of(rank)]

        return Files(ALLOW, choose_own)
    return Files()


def match_weights(specs: Sequence[WeightSpec], checkpoint: Checkpoint, config: Config) -> Matched:
    """As :func:`hotstart.loading.match.match`, of a checkpoint that :func:`open_weights` has opened."""
    if config.load.load_format in LOAD_FORMATS:
        from hotstart.loading.rank import match_rank

        return match_rank(specs, checkpoint, rank_of(config), config.model.dtype)
    if config.load.load_format == "tensorizer":
        from hotstart.checkpoint.tensorizer import MARKER
        from hotstart.loading.rank import match_named
        from hotstart.loading.tensorizer_options import TensorizerOptions

        # Bytes that are encrypted cannot be compared; and vLLM saves a tied weight twice, which is one to it.
        keyfile = TensorizerOptions.parse(config.load.model_loader_extra_config).keyfile
        compared = keyfile is None and MARKER not in checkpoint.files[0].metadata
        return match_named(specs, checkpoint, config.model.dtype, compared=compared)
    return match(specs, checkpoint, config.model.dtype)


def rank_of(config: Config) -> Rank:
    """The rank that this process is: there is one."""
    return Rank(config.parallel.tensor_parallel_size, 0, config.parallel.pipeline_parallel_size, 0)
