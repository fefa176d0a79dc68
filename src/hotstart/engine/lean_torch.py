"""Import torch without what eager inference never touches.

About a third of ``import torch`` is spent in packages such as ``torch.onnx`` or ``torch.export``
that no forward pass uses. :func:`import_torch` puts placeholders for them into ``sys.modules``; the
first access to an attribute, or the import of a submodule, loads the real package in place, so
code that needs one finds it. Nothing is patched.

Two more stretches go: torch's shared library is loaded by a call that lets other threads run (an
import holds the interpreter lock for the fifth of a second that relocating it takes), and numpy is
hidden from torch, whose bridge to it no forward uses. ``import numpy`` works as ever afterwards;
``tensor.numpy()`` does not in such a process. Other people's loaders use that bridge: for them numpy
is not hidden.

Off with ``HOTSTART_LEAN_TORCH=0``, and when torch is imported already. There is no falling back in
the same process: torch's native part cannot be initialised twice. A torch that reacts badly ends
the start with an error that names the switch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType

from hotstart.errors import EngineError

DEFERRED = frozenset(
    {
        "torch._export",
        "torch._meta_registrations",
        "torch.accelerator",
        "torch.ao",
        "torch.compiler",
        "torch.cpu",
        "torch.distributions",
        "torch.export",
        "torch.hub",
        "torch.masked",
        "torch.mps",
        "torch.mtia",
        "torch.multiprocessing",
        "torch.nested",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.onnx",
        "torch.optim",
        "torch.profiler",
        "torch.sparse",
        "torch.testing",
        "torch.utils.data",
        "torchgen.model",
    }
)

_META = "torch._meta_registrations"
"""torch._dynamo (which optimizers import too) relies on the order in which this one imports others."""


def import_torch(*, numpy: bool = False) -> str:
    """Import torch; returns how, for the log: ``lean``, or ``plain`` and why.

    ``numpy``: it is not hidden. Raises EngineError when the lean import fails.
    """
    if "torch" in sys.modules:
        return "already imported"
    if os.environ.get("HOTSTART_LEAN_TORCH") == "0":
        _import()
        return "plain (HOTSTART_LEAN_TORCH=0)"
    _load_library()
    sys.meta_path.insert(0, _DeferringFinder(DEFERRED))
    try:
        with contextlib.nullcontext() if numpy else _without_numpy():
            _import()
    except Exception as error:
        raise EngineError(
            f"torch could not be imported: {type(error).__name__}: {error}",
            advice="Check that `python -c 'import torch'` works; if it does, set HOTSTART_LEAN_TORCH=0",
        ) from error
    return "lean, with numpy" if numpy else "lean"


def import_plainly() -> None:
    """Import all of torch, for a process whose other code may want it."""
    if "torch" not in sys.modules:
        _import()


def _import() -> None:
    # No garbage to speak of, and a collector that walks half a million new objects again and again.
    enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            # numpy is no dependency of torch, nor of ours.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy: No module named")
            import torch  # noqa: F401
    finally:
        if enabled:
            gc.enable()


def _load_library() -> None:
    """Have the dynamic linker load torch's largest library, without the interpreter lock."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    library = os.path.join(spec.submodule_search_locations[0], "lib", "libtorch_cpu.so")
    # Through ctypes' own loading the lock would be held. A failure costs nothing: the import tries again.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    dlopen(library.encode(), os.RTLD_NOW)


@contextlib.contextmanager
def _without_numpy() -> Iterator[None]:
    """Let torch find no numpy (80 ms), unless it is loaded anyway."""
    if "numpy" in sys.modules:
        yield
        return
    sys.modules["numpy"] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            yield
    finally:
        del sys.modules["numpy"]


class _Deferred(ModuleType):
    """A module that loads when somebody wants something of it."""

    def __getattr__(self, name: str) -> object:
        # The import system asks for dunder names (``__path__``, ``__file__``) that are set or absent.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        _load(self)
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        _load(self)
        return list(super().__dir__())


class _DeferringLoader:
    """Stands in for the real loader until the module is used."""

    def __init__(self, real: importlib.machinery.SourceFileLoader) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing yet."""


class _Loaded:
    """Hands out a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It ran; only its own spec has to be put back."""
        with contextlib.suppress(AttributeError):  # torch's configuration modules refuse, as they did ours
            module.__spec__ = self._spec


class _DeferringFinder:
    """Finds the deferred names; a submodule of one loads its parent first."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent = sys.modules.get(name.rpartition(".")[0])
        if type(parent) is _Deferred:
            _load(parent)
            loaded = sys.modules.pop(name, None)
            if loaded is not None:
                # The parent has imported it just now. The import system looked before, and would run it
                # again into a second module, unless it finds a loader that gives it the first.
                return importlib.machinery.ModuleSpec(name, _Loaded(loaded))  # type: ignore[arg-type]
        if name == "torch._dynamo" and type(meta := sys.modules.get(_META)) is _Deferred:
            _load(meta)
        if name not in self._names or name in sys.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _DeferringLoader(spec.loader)  # type: ignore[assignment]
        return spec


def _load(module: ModuleType) -> None:
    spec = module.__spec__
    assert spec is not None
    loader = spec.loader
    module.__class__ = ModuleType
    if isinstance(loader, _DeferringLoader):
        spec.loader = loader.real
        module.__loader__ = loader.real
        loader.real.exec_module(module)
