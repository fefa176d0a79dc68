"""The loaders behind ``--load-format``, as one table: what each needs, takes and reads.

Parsing, refusals, ``hotstart check``, ``docs/loaders.md`` and the tests are views of the rows. Nothing is
imported to look at them: a start with ``--load-format auto`` pays for no loader but its own.

A row without an adapter carries ``because`` and ``instead`` and is refused by name. To add the adapter
of a format: write its module in ``hotstart.loading.streams`` (see there), name it in the row as
``module``, and remove ``because`` and ``instead``.
"""

from __future__ import annotations

from hotstart.errors import ConfigError

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hotstart.errors import HotstartError

PLACES = ("dir", "s3", "gs", "az", "http", "https", "hub")
"""Where a model can lie: a directory, a store or server by its scheme, or a name on the hub."""

_FILES_ONLY = "it reads files of this machine"
_NO_WEB = "it reads directories, s3://, gs:// and az://"


_LARGEST = 1 << 62
"""More bytes than any machine has, and less than what libraries keep in 64 bits."""
_MOST_READERS = 1024
"""Threads, connections or reads in flight: far more than help anywhere, and as many as any library starts."""
SECRETS = "s3_"
"""How keys begin whose values no log and no error may have."""


class Key:
    """One key of ``--model-loader-extra-config``; ``text`` tells what is right.

    ``least`` and ``most`` bound numbers. ``fields``: the keys of an object.
    """

    __slots__ = ("fields", "kind", "least", "most", "text")

    def __init__(
        self,
        kind: type,
        text: str,
        *,
        least: int = 0,
        most: int = _LARGEST,
        fields: Mapping[str, Key] | None = None,
    ) -> None:
        self.kind, self.text, self.least, self.most = kind, text, least, most
        self.fields = fields or {}

    def takes(self, value: object) -> bool:
        """Whether the value has the right type and size; of an object, its fields are not looked at."""
        if type(value) is not self.kind:  # true is no number
            return False
        if isinstance(value, str):
            return _is_text(value)
        return not isinstance(value, int) or self.least <= value <= self.most


def _is_text(value: str) -> bool:
    """Whether it can be part of a name and of a line: no control characters, and no half ones."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return bool(value) and all(each >= " " and each != "\x7f" for each in value)


class LoadFormat:
    """One row: see the fields."""

    __slots__ = (
        "because",
        "device",
        "distribution",
        "extra",
        "file_flags",
        "instead",
        "keys",
        "library",
        "module",
        "parts",
        "places",
        "refused_keys",
        "text",
    )

    def __init__(
        self,
        text: str,
        *,
        library: str = "",
        distribution: str = "",
        extra: str = "",
        module: str = "",
        keys: Mapping[str, Key] | None = None,
        refused_keys: Mapping[str, tuple[str, str]] | None = None,
        places: Mapping[str, tuple[str, str]] | None = None,
        parts: Mapping[str, tuple[str, str]] | None = None,
        device: str = "",
        because: str = "",
        instead: str = "",
    ) -> None:
        self.text = text
        """What it is, for people."""
        self.library = library
        """The module to import; empty: nothing but hotstart is needed."""
        self.distribution = distribution
        """Its name on the package index."""
        self.extra = extra
        """The extra of hotstart that brings it."""
        self.module = module
        """The adapter, below ``hotstart.loading.streams``; empty: hotstart's own readers."""
        self.keys = keys or {}
        self.refused_keys = refused_keys or {}
        """Keys of vLLM's, at any depth, that would do nothing: ``(because, instead)``."""
        self.places = places or {}
        """Places that it cannot read: ``(because, instead)``."""
        self.parts = parts or {}
        """What a place needs beside the library: the module, and its name on the package index."""
        self.device = device
        """``cuda`` where nothing else will do."""
        self.because = because
        """Why the format is refused as a whole; empty: it is not."""
        self.instead = instead

    @property
    def install(self) -> str:
        """The command that brings the library."""
        return f"pip install {self.needed}"

    @property
    def needed(self) -> str:
        """What ``pip install`` must be given."""
        return f"'hotstart[{self.extra}]'"


def _readers(what: str) -> Key:
    return Key(int, f"{what}, 1 to {_MOST_READERS}", least=1, most=_MOST_READERS)


_CONCURRENCY = _readers("reads in flight")
_OWN_KEYS = {
    "concurrency": _CONCURRENCY,
    "memory_limit": Key(
        int,
        "bytes of staging memory at most; -1: no bound, 0: the least that works, "
        "left out: a quarter of what is free",
        least=-1,
    ),
    "num_threads": _readers("the same as concurrency"),
    "enable_multithread_load": Key(bool, "true or false; reads are parallel either way"),
}
_RUNAI_KEYS = {
    "concurrency": _readers("threads, or connections to a store"),
    "memory_limit": Key(
        int,
        "bytes of its buffer at most; -1: as large as the model, 0: as its largest tensor, "
        "left out: a quarter of what is free, and 512 MiB at most",
        least=-1,
    ),
    "distributed": Key(bool, "true or false; ranks read once together, so it matters with several of them"),
}
_RUNAI_PARTS = {
    "s3": ("runai_model_streamer_s3", "runai-model-streamer-s3"),
    "gs": ("runai_model_streamer_gcs", "runai-model-streamer-gcs"),
    "az": ("runai_model_streamer_azure", "runai-model-streamer-azure"),
}
_PATTERN = {
    "pattern": Key(
        str,
        "the names of the files, with {rank} (or {tp_rank}), {pp_rank} where there are stages, and {part}; "
        "left out: model-rank-{rank}-part-{part}.safetensors",
    )
}
_FAST_KEYS = {
    "concurrency": _readers("threads that read"),
    "memory_limit": Key(
        int,
        "bytes of its buffers at most; -1: whole files, 0: the least that works, "
        "left out: a quarter of what is free, and 2 GiB at most",
        least=-1,
    ),
}
_INSTANT_KEYS = {
    "concurrency": _readers("reads in flight"),
    "memory_limit": Key(
        int,
        "bytes of its buffer on the GPU at most; 0: the least that works, -1 or left out: it decides, "
        "half of what is free there at most",
        least=-1,
    ),
}
_NUM_READERS = _readers("files or connections that are read at once")
_VERIFY_HASH = Key(bool, "whether hashes are compared; left out: true")
_VLLM_KEYS = {
    "tensorizer_uri": Key(
        str, "the file, which lies in MODEL, with %03d at most for the rank; left out: model.tensors"
    ),
    "tensorizer_dir": Key(str, "the same as MODEL; not beside tensorizer_uri"),
    "vllm_tensorized": Key(bool, "true or false; it is found out either way"),
    "verify_hash": _VERIFY_HASH,
    "num_readers": _NUM_READERS,
    "encryption_keyfile": Key(str, "a file with the 32 bytes of the key"),
    "s3_access_key_id": Key(str, "of S3, with s3_secret_access_key; left out: as for every loader"),
    "s3_secret_access_key": Key(str, "of S3, with s3_access_key_id"),
    "s3_endpoint": Key(str, "the address of S3; left out: as for every loader"),
    "stream_kwargs": Key(
        dict,
        "an object with buffer_size, the bytes that are read ahead of a store",
        fields={"buffer_size": Key(int, "bytes, 1 to 1073741824", least=1, most=1 << 30)},
    ),
    "deserialization_kwargs": Key(
        dict,
        "an object with num_readers, verify_hash",
        fields={"num_readers": _NUM_READERS, "verify_hash": _VERIFY_HASH},
    ),
}
_TENSORIZER_KEYS = _VLLM_KEYS | {
    "concurrency": _readers("the same as num_readers"),
    "memory_limit": Key(
        int,
        "bytes of tensors that it holds at most; -1: no bound, 0: one tensor at a time, "
        "left out: a quarter of what is free, and 2 GiB at most",
        least=-1,
    ),
    "tensorizer_config": Key(
        dict,
        "an object with these keys, as vLLM passes them on, but for concurrency and memory_limit",
        fields=_VLLM_KEYS,
    ),
}
_PLAID = ("the library takes it and does nothing with it", "Leave it out")
_TENSORIZER_REFUSED = {
    "plaid_mode": _PLAID,
    "plaid_mode_buffers": _PLAID,
    "serialization_kwargs": (
        "it is for writing, and nothing is written",
        "Leave it out; hotstart convert tensorizer writes, and its --encrypt encrypts",
    ),
}


def _unreadable(places: Collection[str], because: str, instead: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(places, (because, instead))


_STORES = ("s3", "gs", "az")
_WEB = ("http", "https")
_AUTO = "leave --load-format out: hotstart's own reader reads it there"
_STREAMER = "use --load-format runai_streamer, or leave it out: hotstart's own reader reads it there too"
_PLAIN = "the plain checkpoint loads without it: leave --load-format out"
_CONVERT = "pass a directory with safetensors"
_PICKLE = "pickle files can run code, so they are never read"
_TO_SAFETENSORS = "convert the weights to safetensors"

FORMATS: dict[str, LoadFormat] = {
    "auto": LoadFormat("safetensors, by hotstart's own readers", keys=_OWN_KEYS),
    "safetensors": LoadFormat("the same as auto", keys=_OWN_KEYS),
    "dummy": LoadFormat("random weights; nothing is read"),
    "runai_streamer": LoadFormat(
        "safetensors, by the Run:ai Model Streamer",
        library="runai_model_streamer",
        distribution="runai-model-streamer",
        extra="runai",
        module="runai_streamer",
        keys=_RUNAI_KEYS,
        places=_unreadable(_WEB, _NO_WEB, _AUTO),
        parts=_RUNAI_PARTS,
    ),
    "fastsafetensors": LoadFormat(
        "safetensors, by fastsafetensors; straight into a GPU where GPUDirect Storage works",
        library="fastsafetensors",
        distribution="fastsafetensors",
        extra="fastsafetensors",
        module="fast_safetensors",
        keys=_FAST_KEYS,
        places=_unreadable(_STORES, _FILES_ONLY, _STREAMER) | _unreadable(_WEB, _FILES_ONLY, _AUTO),
    ),
    "instanttensor": LoadFormat(
        "safetensors, by InstantTensor, into an NVIDIA GPU",
        library="instanttensor",
        distribution="instanttensor",
        extra="instanttensor",
        module="instant_tensor",
        keys=_INSTANT_KEYS,
        places=_unreadable(_STORES, _FILES_ONLY, _STREAMER) | _unreadable(_WEB, _FILES_ONLY, _AUTO),
        device="cuda",
    ),
    "runai_streamer_sharded": LoadFormat(
        "weights stored rank by rank, by the Run:ai Model Streamer",
        library="runai_model_streamer",
        distribution="runai-model-streamer",
        extra="runai",
        module="runai_streamer",
        keys=_RUNAI_KEYS | _PATTERN,
        places=_unreadable(_WEB, _NO_WEB, "use --load-format sharded_state, which reads them there too"),
        parts=_RUNAI_PARTS,
    ),
    "sharded_state": LoadFormat(
        "weights stored rank by rank, by hotstart's own readers", keys=_OWN_KEYS | _PATTERN
    ),
    "tensorizer": LoadFormat(
        "a file of CoreWeave's Tensorizer, which hotstart convert tensorizer writes",
        library="tensorizer",
        distribution="tensorizer",
        extra="tensorizer",
        module="tensorizer",
        keys=_TENSORIZER_KEYS,
        refused_keys=_TENSORIZER_REFUSED,
    ),
    "ipc_cache": LoadFormat(
        "weights that another process keeps in a GPU",
        because="weights are not shared between processes",
        instead=_PLAIN,
    ),
    "modelexpress": LoadFormat(
        "weights from another server's GPU",
        because="weights are not taken from other servers",
        instead=_PLAIN,
    ),
    "mistral": LoadFormat(
        "consolidated safetensors with Mistral's own names",
        because="checkpoints in the mistral layout are not supported",
        instead="pass the same model in the layout of transformers (config.json, model*.safetensors)",
    ),
    "gguf": LoadFormat(
        "llama.cpp's files",
        because="checkpoints in the gguf layout are not supported",
        instead="pass the safetensors that the file was made from",
    ),
    "bitsandbytes": LoadFormat(
        "weights quantized while they load",
        because="checkpoints in the bitsandbytes layout are not supported",
        instead="pass a checkpoint in bfloat16, float16 or float32",
    ),
    "hf": LoadFormat(
        "safetensors, else pickle",
        because="it also reads pickle files, which can run code",
        instead="use auto or safetensors",
    ),
    "pt": LoadFormat("pickle files", because=_PICKLE, instead=_TO_SAFETENSORS),
    "npcache": LoadFormat("pickle files and a numpy copy of them", because=_PICKLE, instead=_TO_SAFETENSORS),
}
"""By the name that vLLM has for it."""

ACCEPTED = tuple(name for name, row in FORMATS.items() if not row.because)
REFUSALS = {name: (row.because, row.instead) for name, row in FORMATS.items() if row.because}
"""Values of ``--load-format`` that are refused: ``(because, instead)``."""


def is_stream(name: str) -> bool:
    """Whether another library reads, and hotstart takes its tensors."""
    return bool(FORMATS[name].module)


def key_problems(name: str, given: Mapping[str, object]) -> list[HotstartError]:
    """What is wrong with ``--model-loader-extra-config`` for a format; each lists what is right."""
    row = FORMATS[name]
    where = "" if row.keys is _OWN_KEYS else f" for --load-format {name}"
    return _problems(row, row.keys, given, "", where)


def place_problem(name: str, place: str) -> HotstartError | None:
    """Why a format cannot read there; ``place`` is one of :data:`PLACES`."""
    row = FORMATS[name]
    if place not in row.places:
        return None
    because, instead = row.places[place]
    readable = [_shown(each) for each in PLACES if each not in row.places]
    return ConfigError(
        f"--load-format {name} cannot read {_shown(place)}: {because}",
        expected=", ".join(readable),
        advice=instead,
    )


def device_problem(name: str, kind: str) -> HotstartError | None:
    """Why a format cannot load into a device of that kind (``cpu`` or ``cuda``)."""
    row = FORMATS[name]
    if not row.device or row.device == kind:
        return None
    return ConfigError(
        f"--load-format {name} loads into an NVIDIA GPU only, and the device is the {kind.upper()}",
        expected="--device cuda",
        advice="Leave --load-format out, or use --load-format fastsafetensors, which loads into memory too",
    )


def _shown(place: str) -> str:
    return {"dir": "a directory", "hub": "a name on the hub (downloaded first)"}.get(place, f"{place}://")


def _problems(
    row: LoadFormat, keys: Mapping[str, Key], given: Mapping[str, object], above: str, where: str
) -> list[HotstartError]:
    """``above``: the keys of the objects that it is in, each with a dot behind."""
    found: list[HotstartError] = []
    for key, value in given.items():
        known = keys.get(key)
        if known is None:
            found.append(_unknown(row, keys, f"{above}{key}", where))
        elif not known.takes(value):
            found.append(
                ConfigError(
                    f"--model-loader-extra-config: {above}{key} is {_told(key, value)}{where}",
                    expected=known.text,
                )
            )
        elif isinstance(value, dict):
            found += _problems(row, known.fields, value, f"{above}{key}.", where)
    return found


def _unknown(row: LoadFormat, keys: Mapping[str, Key], key: str, where: str) -> HotstartError:
    last = key.rpartition(".")[2]
    if last in row.refused_keys:
        because, instead = row.refused_keys[last]
        return ConfigError(f"--model-loader-extra-config: {key} is refused{where}: {because}", advice=instead)
    if last.startswith(SECRETS) and "stream_kwargs" in key:
        right = (
            "s3_access_key_id, s3_secret_access_key and s3_endpoint beside it, or AWS_* in the environment"
        )
    else:
        right = "; ".join(f"{known} ({each.text})" for known, each in keys.items()) or "no keys at all"
    return ConfigError(f"--model-loader-extra-config has no key {key[:80]!r}{where}", expected=right)


def _told(key: str, value: object) -> str:
    """A wrong value for a message: no secret, and not pages of it."""
    kinds: tuple[tuple[type, str], ...] = ((dict, "an object"), (list, "a list"))
    for kind, said in kinds:
        if isinstance(value, kind):
            return said
    if key.startswith(SECRETS):
        return "not a text" if not isinstance(value, str) else "a text that is empty or cannot be used"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
