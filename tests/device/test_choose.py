"""Which device a server runs on: --device, CUDA_VISIBLE_DEVICES, and what the machine has."""

from __future__ import annotations

import sys

import pytest

from hotstart.device.base import DeviceInfo, NoDriverError
from hotstart.device.choose import DeviceChoice, choose
from hotstart.device.driver import Driver
from hotstart.device.nvml import MigSlice, PhysicalGpu
from hotstart.errors import ConfigError, DeviceError

A = "GPU-11111111-aaaa-0000-0000-000000000001"
B = "GPU-11112222-bbbb-0000-0000-000000000002"
SLICE = "MIG-99999999-cccc-0000-0000-000000000003"
GPUS = [
    PhysicalGpu(0, A, "Big GPU"),
    PhysicalGpu(1, B, "Sliced GPU", (MigSlice(SLICE, 1, 0), MigSlice("MIG-88", 2, 0))),
]


class Machine:
    """A machine on paper: ``visible`` is what its driver would list."""

    def __init__(
        self, visible: int = 2, *, gpus: list[PhysicalGpu] = GPUS, torch_cuda: bool = True,
        capability: tuple[int, int] = (9, 0), driver_error: DeviceError | None = None,
    ) -> None:  # fmt: skip
        self._visible, self._gpus, self._torch = visible, gpus, torch_cuda
        self._capability, self._error = capability, driver_error

    def torch_has_cuda(self) -> bool:
        return self._torch

    def gpus(self) -> list[PhysicalGpu]:
        return self._gpus

    def devices(self) -> list[DeviceInfo]:
        if self._error:
            raise self._error
        return [
            DeviceInfo("cuda", n, "Big GPU", A if n == 0 else B, False, self._capability)
            for n in range(self._visible)
        ]


def chosen(device: str, visible: str | None = None, machine: Machine | None = None) -> DeviceChoice:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return choose(device, environ, machine or Machine())


def test_auto_takes_the_first_visible_gpu_and_says_which() -> None:
    choice = chosen("auto")
    assert (choice.kind, choice.torch_name) == ("cuda", "cuda:0")
    assert choice.reason == f"cuda:0 Big GPU, {A}: the first visible GPU"


def test_a_number_counts_the_visible_gpus() -> None:
    assert chosen("cuda:1").torch_name == "cuda:1"


def test_cpu_asks_nothing_of_the_driver() -> None:
    broken = Machine(driver_error=DeviceError("must not be asked"))
    assert chosen("cpu", "no such thing", broken).kind == "cpu"


@pytest.mark.parametrize(
    ("machine", "visible", "reason"),
    [
        (Machine(torch_cuda=False), None, "the installed torch has no CUDA"),
        (Machine(driver_error=DeviceError("libcuda is absent")), None, "libcuda is absent"),
        (Machine(0, gpus=[]), None, "the driver sees no GPU"),
        (Machine(0, gpus=[]), "0", "the driver sees no GPU (CUDA_VISIBLE_DEVICES='0')"),
        (Machine(), "", "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        (Machine(), " ", "CUDA_VISIBLE_DEVICES=' ' hides every GPU"),
        (Machine(), "-1", "CUDA_VISIBLE_DEVICES='-1' hides every GPU"),
        (Machine(capability=(7, 0)), None, f"cuda:0 Big GPU, {A} has compute capability 7.0"),
    ],
)
def test_what_makes_auto_take_the_cpu_is_an_error_when_a_gpu_was_asked_for(
    machine: Machine, visible: str | None, reason: str
) -> None:
    choice = chosen("auto", visible, machine)
    assert (choice.kind, choice.reason) == ("cpu", f"CPU: {reason}")
    with pytest.raises(DeviceError) as error:
        chosen("cuda", visible, machine)
    assert str(error.value).startswith(f"--device cuda, but {reason}")


@pytest.mark.parametrize(
    ("machine", "visible"),
    [
        (Machine(torch_cuda=False), None),
        (Machine(driver_error=NoDriverError("libcuda is absent")), None),
        (Machine(0, gpus=[]), ""),
    ],
)
def test_a_machine_without_gpus_is_no_cause_for_a_warning(machine: Machine, visible: str | None) -> None:
    assert chosen("auto", visible, machine).warning == ""


@pytest.mark.parametrize(
    ("machine", "visible", "warning"),
    [
        (Machine(driver_error=DeviceError("cuInit: 803", advice="Reboot")), None, "cuInit: 803. Reboot."),
        (Machine(0, gpus=[]), None, "the driver sees no GPU. Check nvidia-smi"),
        (Machine(), "", "CUDA_VISIBLE_DEVICES='' hides every GPU. Unset CUDA_VISIBLE_DEVICES"),
        (Machine(capability=(7, 0)), None, "has compute capability 7.0; expected 7.5 or higher. Choose"),
    ],
)
def test_a_gpu_that_is_passed_over_is_a_warning_that_says_why_and_what_to_do(
    machine: Machine, visible: str | None, warning: str
) -> None:
    assert warning in chosen("auto", visible, machine).warning
    assert chosen("cpu", visible, machine).warning == "", "as ordered"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "rocm", ""])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda or cuda:N"):
        chosen(device)


def test_a_number_past_the_visible_ones_lists_them() -> None:
    with pytest.raises(DeviceError, match=rf"2 GPUs are visible; expected at least 3.*{A}.*{B}"):
        chosen("cuda:2")


@pytest.mark.parametrize(
    "visible",
    ["0", "1,0", " 0 , 1 ", A, A.lower(), A[:13], f"{B},{A}", SLICE, SLICE[:9], f"MIG-{B}/1/0", "0,-1,7"],
)
def test_every_form_that_names_a_device_is_accepted(visible: str) -> None:
    assert chosen("auto", visible).kind == "cuda"


@pytest.mark.parametrize(
    ("visible", "entry"),
    [
        ("2", "2"),
        ("0,7", "7"),
        ("GPU-3333", "GPU-3333"),
        ("GPU-", "GPU-"),
        ("MIG-77", "MIG-77"),
        (f"MIG-{B}/9/0", f"MIG-{B}/9/0"),
        ("cuda:0", "cuda:0"),
        ("all", "all"),
        ("-2", "-2"),
        ("²", "²"),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_an_entry_that_names_nothing_is_an_error_that_lists_what_exists(
    visible: str, entry: str, device: str
) -> None:
    with pytest.raises(DeviceError) as error:
        chosen(device, visible)
    assert f"has the entry {entry!r}, which names no device" in str(error.value)
    assert A in str(error.value)
    assert SLICE in str(error.value)


@pytest.mark.parametrize("visible", ["0,0", f"0,{A}", f"{A},{A[:13]}"])
def test_a_device_named_twice_is_an_error(visible: str) -> None:
    with pytest.raises(DeviceError, match=f"names {A} twice"):
        chosen("auto", visible)


def test_a_short_uuid_that_fits_two_devices_is_an_error() -> None:
    with pytest.raises(DeviceError, match=f"'GPU-1111', which fits {A} and {B}"):
        chosen("auto", "GPU-1111")


def test_an_empty_entry_is_an_error() -> None:
    with pytest.raises(DeviceError, match="has an empty entry"):
        chosen("auto", "0,,1")


def test_without_nvml_the_driver_s_count_finds_the_wrong_entry() -> None:
    with pytest.raises(DeviceError, match="'7', which names no device"):
        chosen("auto", "0,7", Machine(1, gpus=[]))


def test_the_driver_and_torch_see_the_value_without_blanks() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": f" {A} , {B} "}
    choose("auto", environ, Machine())
    assert environ["CUDA_VISIBLE_DEVICES"] == f"{A},{B}"


def test_a_driver_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(NoDriverError, match=r"library libcuda-absent\.so\.1 cannot be loaded"):
        Driver("libcuda-absent.so.1")


@pytest.mark.skipif(sys.platform != "linux", reason="looks for a Linux library")
def test_a_library_that_is_no_driver_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"libc\.so\.6 has no cuInit"):
        Driver("libc.so.6")
