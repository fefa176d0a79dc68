"""Memory that torch did not allocate, as a tensor; by DLPack, so numpy is not needed.

The structures are those of https://github.com/dmlc/dlpack/blob/main/include/dlpack/dlpack.h
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_CPU, _CUDA = 1, 2
_UNSIGNED = 1
_NAME = b"dltensor"


class _DLManagedTensor(ctypes.Structure):
    """DLManagedTensor with its DLTensor, DLDevice and DLDataType spelled out; same layout."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
    ]


# torch reads the structure once more when the last view dies, which may be at exit: never freed.
_alive: list[object] = []


def adopt(address: int, nbytes: int, cuda: int | None) -> Tensor:
    """uint8 [nbytes] at an address, not copied and not owned: the caller keeps the memory.

    ``cuda`` is the device's index; None: host memory. Imports torch.
    """
    import torch
    from torch.utils.dlpack import from_dlpack

    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu" if cuda is None else f"cuda:{cuda}")
    shape, strides = (c_int64 * 1)(nbytes), (c_int64 * 1)(1)
    managed = _DLManagedTensor(
        data=address,
        device_type=_CPU if cuda is None else _CUDA,
        device_id=cuda or 0,
        ndim=1,
        code=_UNSIGNED,
        bits=8,
        lanes=1,
        shape=ctypes.addressof(shape),
        strides=ctypes.addressof(strides),
    )
    _alive.append((managed, shape, strides))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.argtypes, new_capsule.restype = [c_void_p, c_char_p, c_void_p], ctypes.py_object
    tensor: Tensor = from_dlpack(new_capsule(ctypes.addressof(managed), _NAME, None))
    if tensor.data_ptr() != address:
        raise RuntimeError("torch copied memory that it was meant to view")
    return tensor
