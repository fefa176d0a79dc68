"""The weights of a start that another library reads. Torch-free until the load begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from hotstart.config.load_formats import FORMATS
from hotstart.errors import ConfigError, HotstartError, StorageError
from hotstart.loading.stats import stats_of_stream
from hotstart.loading.streams.base import Request, adapter_of, check_limit, library_of
from hotstart.loading.streams.handed_over import secrets_of
from hotstart.loading.tally import LoadReport, Tally
from hotstart.messages import LoadStats

if TYPE_CHECKING:
    import torch

    from hotstart.checkpoint.base import Checkpoint
    from hotstart.loading.arena import Layout
    from hotstart.loading.follower import Follower
    from hotstart.loading.streams.base import TensorStream
    from hotstart.loading.streams.stream_store import StreamStore


_OWN_READER = "read the same files with hotstart's own reader, whose error says what is wrong with them"
_OTHERWISE = {
    "runai_streamer_sharded": f"Use --load-format sharded_state to {_OWN_READER}",
    "tensorizer": "Look with hotstart check, under the same flags, what can be read, and start again: "
    "nothing else reads these files",
}
"""What to do when a library fails, of formats whose files are no plain checkpoint."""


class StreamWeights:
    """``Weights`` of :mod:`hotstart.engine.placement`, filled by a thread that runs a tensor stream.

    The library is imported on that thread, after torch, so that it costs the start nothing before. What
    it raises ends the load with an error that names it: nobody else reads in its place.
    """

    def __init__(
        self,
        request: Request,
        layout: Layout,
        checkpoint: Checkpoint,
        device: Callable[[], torch.device],
        progress: Callable[[int], None],
    ) -> None:
        """``device`` needs torch. Raises ConfigError for a memory limit that cannot hold a tensor."""
        check_limit(request)
        self.total = request.nbytes
        self._request = request
        self._layout = layout
        self._checkpoint = checkpoint
        self._device = device
        self._tally = Tally(request.nbytes, progress)
        self._described = ""
        self._made: StreamStore | None = None
        self._making = threading.Lock()
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def follow(self, follower: Follower) -> Sequence[memoryview]:
        """Nothing: the files' own bytes are never seen."""
        return ()

    def start(self, done: Callable[[object], None] = lambda report: None) -> None:
        """See ``Weights``."""
        threading.Thread(target=self._run, args=(done,), name="weights", daemon=True).start()

    def wait(self) -> LoadReport:
        """See ``Weights``. Raises ModelError for tensors that are absent or wrong, StorageError with the
        library's name for whatever it raised, ConfigError when it cannot be imported."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._tally.report()

    def settle(self) -> None:
        """See ``Weights``: a library holds buffers until it is done, on the GPU too."""
        self.wait()

    def stats(self) -> LoadStats:
        """See ``Weights``."""
        return stats_of_stream(self._checkpoint, self._request.load_format, self._tally)

    def describe(self) -> str:
        """See ``Weights``."""
        return self._described

    def store(self) -> StreamStore:
        """See ``Weights``. Imports torch."""
        from hotstart.loading.streams.stream_store import StreamStore

        with self._making:
            if self._made is None:
                library = library_of(self._request.load_format)
                stored = self._checkpoint.tensors
                self._made = StreamStore(self._layout, self._device(), stored=stored, library=library)
            return self._made

    def may_copy(self, slot: str) -> bool:
        """See ``Weights``."""
        return self.store().may_release(slot)

    def release(self, slot: str) -> None:
        """See ``Weights``."""
        self.store().release(slot)

    def close(self) -> None:
        """The stream is closed by the thread that ran it."""

    def _run(self, done: Callable[[object], None]) -> None:
        try:
            self._load()
            done(self._tally.report())
        except HotstartError as error:
            self._error = error
        except BaseException as error:  # a library may raise anything, and nobody else is told
            self._error = self._named(error)
        self._ended.set()

    def _load(self) -> None:
        store = self.store()
        self._device()  # on a GPU, each thread chooses its own
        self._tally.start()
        stream = adapter_of(self._request.load_format).open_stream(self._request)
        try:
            self._fill(store, stream)
            self._described = str(stream.describe())
        except BaseException:
            with suppress(Exception):  # what went wrong first is what counts
                stream.close()
            raise
        stream.close()
        store.finish()
        if store.on_gpu:
            import torch

            torch.cuda.empty_cache()  # buffers that the library had from torch are torch's still

    def _fill(self, store: StreamStore, stream: TensorStream) -> None:
        asked = time.monotonic()
        for name, tensor in stream:
            came = time.monotonic()
            self._tally.add(store.put(name, tensor), came - asked)
            del tensor  # or it would live while the next one is made
            asked = time.monotonic()

    def _named(self, error: BaseException) -> HotstartError:
        request = self._request
        row = FORMATS[request.load_format]
        library = library_of(request.load_format)
        if isinstance(error, ImportError):
            return ConfigError(
                f"--load-format {request.load_format}: {library} cannot be imported: {error}",
                expected=f"a complete installation of {row.distribution}",
                advice=f"Install it: {row.install}",
            )
        text = " ".join(str(error).split())
        for secret in secrets_of(request.settings) if request.settings is not None else ():
            text = text.replace(secret, "***")
        where = f" (reached by {request.settings.described})" if request.settings is not None else ""
        return StorageError(
            f"{library} failed: {type(error).__name__}: {text[:500]}{where}",
            advice=_OTHERWISE.get(
                request.load_format,
                f"Leave --load-format out to {_OWN_READER}",
            ),
        )
