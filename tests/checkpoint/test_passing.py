"""A checkpoint handed from process to process is the one whose headers were read."""

from __future__ import annotations

from pathlib import Path

from checkpoint_files import write_model, write_shard
from hotstart.checkpoint import passing
from hotstart.checkpoint.layout import open_checkpoint


def test_what_arrives_is_what_was_read(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shards=3)
    write_shard(model / "consolidated.safetensors", {"left": ("F32", (2, 3))})
    checkpoint = open_checkpoint(str(model))
    assert checkpoint.skipped
    assert checkpoint.folder is not None
    assert passing.decode(passing.encode(checkpoint), checkpoint.folder) == checkpoint
