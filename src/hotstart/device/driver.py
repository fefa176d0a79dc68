"""The CUDA driver API through ctypes: 5 ms to load, where any binding package costs ten times that.

Names, types and constants are those of cuda.h; calls go through :meth:`Driver.call`, which turns a
status into a DeviceError with the driver's own name for it.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from hotstart.device.base import DeviceInfo, NoDriverError
from hotstart.errors import DeviceError

LIBRARY = "libcuda.so.1"

NOT_READY = 600
_OUT_OF_MEMORY = 2
_NO_DEVICE = 100
_MAJOR, _MINOR = 75, 76

_ADVICE = {
    _OUT_OF_MEMORY: "Stop what else uses the GPU, or lower --gpu-memory-utilization or --max-model-len",
    46: "Another process holds the GPU in exclusive mode",
    _NO_DEVICE: "Check nvidia-smi, and that the container was started with its GPUs",
    802: "The fabric manager of this machine is not running (systemctl status nvidia-fabricmanager)",
    803: "The kernel module and libcuda are of different versions: reload the module or reboot",
    804: "The CUDA compatibility package does not support this GPU or its driver",
    999: "The driver is in a bad state; dmesg names the cause (look for NVRM and Xid)",
}


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        ("srcXInBytes", c_size_t),
        ("srcY", c_size_t),
        ("srcMemoryType", c_int),
        ("srcHost", c_void_p),
        ("srcDevice", c_uint64),
        ("srcArray", c_void_p),
        ("srcPitch", c_size_t),
        ("dstXInBytes", c_size_t),
        ("dstY", c_size_t),
        ("dstMemoryType", c_int),
        ("dstHost", c_void_p),
        ("dstDevice", c_uint64),
        ("dstArray", c_void_p),
        ("dstPitch", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
    ]


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (POINTER(Memcpy2D), c_void_p),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
}

# These return in microseconds. Keeping the interpreter lock saves asking for it again, which takes
# up to a switch interval (5 ms) each time while another thread imports torch.
_SHORT = frozenset(
    ("cuMemcpyHtoDAsync_v2", "cuMemcpy2DAsync_v2", "cuEventRecord", "cuEventQuery", "cuCtxSetCurrent")
)


class Driver:
    """The loaded and initialised driver.

    CUDA_VISIBLE_DEVICES counts at this moment: later changes have no effect.
    Raises NoDriverError when the library is absent, DeviceError when it refuses to start.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            releasing, keeping = ctypes.CDLL(library), ctypes.PyDLL(library)
        except OSError as error:
            raise NoDriverError(
                f"the CUDA driver library {library} cannot be loaded ({error})",
                advice="Install the NVIDIA driver, or start the container with its GPUs; --device cpu runs"
                " without",
            ) from error
        self._functions: dict[str, Any] = {}
        for name, types in _SIGNATURES.items():
            try:
                function = getattr(keeping if name in _SHORT else releasing, name)
            except AttributeError as error:
                raise DeviceError(
                    f"{library} has no {name}", expected="a driver for CUDA 12 or later"
                ) from error
            function.argtypes, function.restype = types, c_int
            self._functions[name] = function
        status = self.status("cuInit", 0)
        # Hidden or missing GPUs are no failure of the driver: it lists none.
        if status != _NO_DEVICE:
            self._check("cuInit", status)
        self._devices = 0 if status == _NO_DEVICE else self._integer("cuDeviceGetCount")

    def call(self, name: str, *arguments: Any) -> None:
        """Call and raise DeviceError unless the status is success."""
        self._check(name, self._functions[name](*arguments))

    def status(self, name: str, *arguments: Any) -> int:
        """Call and return the CUresult."""
        return int(self._functions[name](*arguments))

    def devices(self) -> list[DeviceInfo]:
        """The visible devices, in the driver's order, which is torch's."""
        return [self._info(index) for index in range(self._devices)]

    def handle(self, index: int) -> int:
        """The CUdevice of a visible device."""
        return self._integer("cuDeviceGet", index)

    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports."""
        number = self._integer("cuDriverGetVersion")
        return number // 1000, number % 1000 // 10

    def _info(self, index: int) -> DeviceInfo:
        device = self.handle(index)
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), device)
        name = text.value.decode(errors="replace")
        raw = ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid_v2", raw, device)
        digits = raw.raw.hex()
        mig = " MIG " in name
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        total = c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        major = self._integer("cuDeviceGetAttribute", _MAJOR, device)
        minor = self._integer("cuDeviceGetAttribute", _MINOR, device)
        prefix = "MIG-" if mig else "GPU-"
        return DeviceInfo("cuda", index, name, prefix + uuid, mig, (major, minor), total.value)

    def _integer(self, name: str, *arguments: Any) -> int:
        value = c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def _check(self, name: str, status: int) -> None:
        if status:
            title, text = c_char_p(), c_char_p()
            self._functions["cuGetErrorName"](status, ctypes.byref(title))
            self._functions["cuGetErrorString"](status, ctypes.byref(text))
            shown = (title.value or b"unknown error").decode()
            meaning = f": {text.value.decode()}" if text.value else ""
            raise DeviceError(
                f"{name} failed with {shown} ({status}){meaning}", advice=_ADVICE.get(status, "")
            )
