"""Which device to run on, and why."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from hotstart.device import visibility
from hotstart.device.base import Device, DeviceInfo, NoDriverError
from hotstart.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from hotstart.device.nvml import PhysicalGpu

MINIMUM_CAPABILITY = (7, 5)


class DeviceChoice(Struct, frozen=True):
    """The outcome; ``reason`` is one log line."""

    info: DeviceInfo
    reason: str
    warning: str = ""
    """Why the CPU was taken on a machine that is meant to have a GPU: probably not what was wanted."""

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.info.kind

    @property
    def torch_name(self) -> str:
        """What ``torch.device`` takes."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.info.index}"


class System(Protocol):
    """What there is to choose from."""

    def torch_has_cuda(self) -> bool:
        """Whether the installed torch is a CUDA build."""
        ...

    def gpus(self) -> list[PhysicalGpu]:
        """All GPUs, hidden ones too; empty when unknown."""
        ...

    def devices(self) -> list[DeviceInfo]:
        """The visible ones. Raises NoDriverError, or DeviceError for a driver that does not work."""
        ...


def choose(
    device: str, environ: MutableMapping[str, str] | None = None, system: System | None = None
) -> DeviceChoice:
    """Resolve ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    ``auto`` takes the first visible GPU that torch can use, else the CPU. Blanks are removed from
    CUDA_VISIBLE_DEVICES in ``environ`` (default: this process's), since neither the driver nor
    torch expects them; call it before anything else initialises CUDA.

    Raises ConfigError for another value, DeviceError when the GPU asked for cannot be used, and for
    entries of CUDA_VISIBLE_DEVICES that name nothing, whatever was asked for but ``cpu``.
    """
    if device == "cpu":
        return _cpu("--device cpu")
    name, _, number = device.partition(":")
    if device != "auto" and (name != "cuda" or (number and not number.isdecimal()) or device == "cuda:"):
        raise ConfigError(f"--device {device}", expected="auto, cpu, cuda or cuda:N")
    automatic = device == "auto"
    try:
        infos = _visible(os.environ if environ is None else environ, system or Machine())
        info = infos[0] if automatic else _numbered(infos, int(number or 0))
        _check_capability(info)
    except _NoGpuError as absent:
        if not automatic:
            raise DeviceError(
                f"--device {device}, but {absent.found}", expected=absent.expected, advice=absent.advice
            ) from None
        return _cpu(absent.found, "" if isinstance(absent, _NothingToUseError) else str(absent))
    asked = "the first visible GPU" if automatic else f"--device {device}"
    return DeviceChoice(info, f"{info}: {asked}")


def open_device(choice: DeviceChoice) -> Device:
    """The device itself; its context is created by the first ``attach``."""
    if choice.kind == "cpu":
        from hotstart.device.cpu import CpuDevice

        return CpuDevice()
    from hotstart.device.cuda import CudaDevice
    from hotstart.device.driver import Driver

    return CudaDevice(Driver(), choice.info)


class Machine:
    """The real one."""

    def torch_has_cuda(self) -> bool:
        """Looks for the CUDA half of torch's libraries; imports nothing."""
        spec = importlib.util.find_spec("torch")
        folders = (spec.submodule_search_locations or []) if spec else []
        return any(os.path.exists(os.path.join(f, "lib", "libtorch_cuda.so")) for f in folders)

    def gpus(self) -> list[PhysicalGpu]:
        """By NVML."""
        from hotstart.device import nvml

        return nvml.gpus()

    def devices(self) -> list[DeviceInfo]:
        """By the driver."""
        from hotstart.device.driver import Driver

        return Driver().devices()


class _NoGpuError(DeviceError):
    """No GPU can be used: ``auto`` goes on with the CPU."""


class _NothingToUseError(_NoGpuError):
    """As on any machine without a GPU: nobody need be warned."""


def _visible(environ: MutableMapping[str, str], system: System) -> list[DeviceInfo]:
    """The visible GPUs, at least one; raises _NoGpuError, or DeviceError for a wrong entry."""
    if not system.torch_has_cuda():
        raise _NothingToUseError(
            "the installed torch has no CUDA", advice="Install a CUDA build of torch to use a GPU"
        )
    value = environ.get(visibility.VARIABLE)
    wanted = None if value is None else visibility.entries(value)
    if wanted is not None:
        environ[visibility.VARIABLE] = ",".join(wanted)
    if wanted == []:
        hidden = _NoGpuError if system.gpus() else _NothingToUseError
        raise hidden(
            f"{visibility.VARIABLE}={value!r} hides every GPU",
            advice=f"Unset {visibility.VARIABLE}, or name a GPU in it",
        )
    try:
        infos = system.devices()
    except DeviceError as error:
        kind = _NothingToUseError if isinstance(error, NoDriverError) else _NoGpuError
        raise kind(error.found, expected=error.expected, advice=error.advice) from error
    if value is not None and wanted is not None:
        existing = system.gpus()
        if existing:
            visibility.check(value, existing)
        elif 0 < len(infos) < len(wanted):
            raise visibility.unknown(value, wanted[len(infos)], existing)
    if not infos:
        shown = "" if value is None else f" ({visibility.VARIABLE}={value!r})"
        raise _NoGpuError(
            f"the driver sees no GPU{shown}", advice="Check nvidia-smi, and the container's GPU option"
        )
    return infos


def _numbered(infos: list[DeviceInfo], index: int) -> DeviceInfo:
    if index >= len(infos):
        names = "; ".join(str(info) for info in infos)
        raise _NoGpuError(f"{len(infos)} GPUs are visible", expected=f"at least {index + 1}", advice=names)
    return infos[index]


def _check_capability(info: DeviceInfo) -> None:
    if info.capability < MINIMUM_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (info.capability, MINIMUM_CAPABILITY))
        raise _NoGpuError(
            f"{info} has compute capability {have}",
            expected=f"{need} or higher",
            advice="Choose another GPU with CUDA_VISIBLE_DEVICES, or run with --device cpu",
        )


def _cpu(reason: str, warning: str = "") -> DeviceChoice:
    from hotstart.device import host

    info = DeviceInfo(kind="cpu", index=0, name="CPU", total=host.memory().limit)
    return DeviceChoice(info, f"CPU: {reason}", warning)
