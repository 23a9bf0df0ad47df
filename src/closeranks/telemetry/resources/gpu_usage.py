"""What does one NVIDIA GPU do: utilisation, clocks and why they are lowered, power, temperature, errors, links?

Through NVML (``pip install closeranks[gpu]``). Without the package, the driver or the device there are no figures, and
a figure that a device does not have is left out: NVML says so for each call. Its calls release the GIL.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from closeranks.telemetry.resources.reading import Reading

_KIB = 1 << 10
_ALL_LINKS = 0xFFFFFFFF
_REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
"""NVML's reasons for clocks below their maximum; that the device is idle (0x1) is none."""


def throttle_words(mask: int) -> tuple[str, ...]:
    return tuple(words for bit, words in _REASONS.items() if mask & bit)


class GpuUsage:
    """``uuid``: the device as CUDA names it, since NVML counts devices differently."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._nvml: Any = None
        self._device: Any = None
        self._absent: set[str] = set()
        """What the device does not have; it is asked for once."""

    def open(self) -> bool:
        """Called on the thread that reads; takes some tens of milliseconds."""
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._device = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid.encode())
        except Exception:  # no package, no driver, or a device that NVML does not know
            return False
        return True

    def read(self) -> Reading:
        levels, totals, rates = dict(self._levels()), dict(self._totals()), dict(self._rates())
        mask = self._ask("reasons", lambda: _reasons(self._nvml, self._device))
        return Reading(totals, rates, levels=levels, words=throttle_words(int(mask or 0)))

    def close(self) -> None:
        if self._device is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _levels(self) -> Iterator[tuple[str, float]]:
        nvml, device = self._nvml, self._device
        asked: Mapping[str, Callable[[], float]] = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used,
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            "sm_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        }
        yield from self._answers(asked)

    def _totals(self) -> Iterator[tuple[str, float]]:
        nvml, device = self._nvml, self._device
        volatile = nvml.NVML_VOLATILE_ECC
        asked: dict[str, Callable[[], float]] = {
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000,
            "ecc_corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                device, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile
            ),
            "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile
            ),
            "nvlink_sent_bytes": lambda: self._field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", _ALL_LINKS) * _KIB,
            "nvlink_received_bytes": lambda: self._field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _ALL_LINKS) * _KIB,
            "pcie_sent_bytes": lambda: self._field("NVML_FI_DEV_PCIE_COUNT_TX_BYTES"),
            "pcie_received_bytes": lambda: self._field("NVML_FI_DEV_PCIE_COUNT_RX_BYTES"),
        }
        yield from self._answers(asked)

    def _rates(self) -> Iterator[tuple[str, float]]:
        """Shares of the time in which clocks were lowered, from counters in nanoseconds."""
        nvml, device = self._nvml, self._device
        yield from self._answers(
            {
                "power_throttled_share": lambda: _violation_s(nvml, device, nvml.NVML_PERF_POLICY_POWER),
                "thermal_throttled_share": lambda: _violation_s(nvml, device, nvml.NVML_PERF_POLICY_THERMAL),
            }
        )

    def _answers(self, asked: Mapping[str, Callable[[], float]]) -> Iterator[tuple[str, float]]:
        for name, ask in asked.items():
            if (value := self._ask(name, ask)) is not None:
                yield name, value

    def _ask(self, name: str, ask: Callable[[], float]) -> float | None:
        if name in self._absent:
            return None
        try:
            return ask()
        except (self._nvml.NVMLError, AttributeError):  # an older package does not have every name
            self._absent.add(name)
            return None

    def _field(self, name: str, scope: int = 0) -> int:
        (found,) = self._nvml.nvmlDeviceGetFieldValues(self._device, [(getattr(self._nvml, name), scope)])
        if found.nvmlReturn:
            raise self._nvml.NVMLError(found.nvmlReturn)
        return int(found.value.ullVal)


def _reasons(nvml: Any, device: Any) -> int:
    """Under the new name, or the old one."""
    ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return int((ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(device))


def _violation_s(nvml: Any, device: Any, policy: int) -> float:
    return float(nvml.nvmlDeviceGetViolationStatus(device, policy).violationTime) / 1e9
