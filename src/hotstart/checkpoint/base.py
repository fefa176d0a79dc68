"""What a checkpoint is once its headers and small files have been read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from hotstart.checkpoint.folder import Folder


class TensorRef(Struct, frozen=True):
    """Where one stored tensor lies. ``offset`` is absolute in its file; sizes are bytes."""

    name: str
    file: int
    """Index into :attr:`Checkpoint.files`."""
    dtype: str
    """safetensors' name: ``BF16``, ``F32``, …"""
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ShardFile(Struct, frozen=True):
    """One safetensors file of the chosen set."""

    path: str
    size: int
    data_start: int
    """8 + header length: where the first tensor's bytes may begin."""
    metadata: dict[str, str] = {}
    identity: str = ""
    """The file's identity when its header was read, as ``storage.source`` has it; empty: not known."""


class Skipped(Struct, frozen=True):
    """A weight file that lies in the directory and is not read."""

    path: str
    size: int
    reason: str


class Checkpoint(Struct, frozen=True):
    """The chosen set of weight files, validated: every range lies inside its file, none overlap."""

    path: str
    files: tuple[ShardFile, ...]
    tensors: dict[str, TensorRef]
    skipped: tuple[Skipped, ...] = ()
    index: str | None = None
    """Path of the index that chose the files, if one did."""
    folder: Folder | None = None
    """Where the files lie; None: there are none."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(ref.nbytes for ref in self.tensors.values())


class ModelFiles(Struct, kw_only=True):
    """The small files of a model directory, parsed. Absent ones are None."""

    path: str
    """What messages call the directory: of a model in a store, its folder there."""
    text_path: str = ""
    """The same of the directory with tokenizer and templates, where it is another one."""
    config: dict[str, Any]
    generation_config: dict[str, Any] | None = None
    tokenizer_config: dict[str, Any] | None = None
    special_tokens_map: dict[str, Any] | None = None
    tokenizer_json: str | None = None
    """Path of tokenizer.json."""
    vocab_json: str | None = None
    """Path of vocab.json; used with ``merges_txt`` when there is no tokenizer.json."""
    merges_txt: str | None = None
    chat_template: str | None = None
    """Source text: chat_template.jinja first, then tokenizer_config.json; the ``default`` one of several."""
    chat_templates: dict[str, str] = {}
    """Named templates, when the tokenizer configuration lists several."""
    chat_template_source: str = ""
    """The file the template came from."""
    empty_templates: tuple[str, ...] = ()
    """Files whose templates hold nothing; they count as absent."""

    @property
    def text_folder(self) -> str:
        """What messages call the directory with tokenizer and templates."""
        return self.text_path or self.path
