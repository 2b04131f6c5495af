"""The hardware a problem is for: kind, architecture, number of processors, and the rates that the cost model uses.

A target is parsed without the hardware being there (``Target.parse("cuda:sm_90")``), so that choices can be explained
and kernels compiled anywhere. The rates are leads for ranking engines, from the vendors' data sheets or one measurement;
they never appear in a result.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
from typing import Any

from .errors import DeviceUnavailable, InvalidArgument

KINDS = ("cpu", "cuda", "hip")

# arch -> (processors, memory bytes/s, shared memory bytes a block, {arithmetic: flop/s})
# 'f32' is the plain vector rate, 'tf32' and 'f16' (bf16 alike) the dense matrix-unit rates.
_GPUS = {
    "sm_80": (108, 1.9e12, 163 << 10, {"f16": 312e12, "tf32": 156e12, "f32": 19.5e12, "f64": 19.5e12}),
    "sm_86": (82, 0.9e12, 99 << 10, {"f16": 142e12, "tf32": 71e12, "f32": 35e12, "f64": 0.5e12}),
    "sm_89": (128, 1.0e12, 99 << 10, {"f16": 330e12, "tf32": 165e12, "f32": 82e12, "f64": 1.3e12}),
    "sm_90": (132, 4.3e12, 227 << 10, {"f16": 790e12, "tf32": 400e12, "f32": 60e12, "f64": 60e12}),
    "sm_100": (148, 8.0e12, 227 << 10, {"f16": 2200e12, "tf32": 1100e12, "f32": 80e12, "f64": 40e12}),
    "sm_120": (170, 1.8e12, 99 << 10, {"f16": 420e12, "tf32": 210e12, "f32": 105e12, "f64": 1.6e12}),
    "gfx90a": (104, 1.6e12, 64 << 10, {"f16": 190e12, "tf32": 45e12, "f32": 22e12, "f64": 22e12}),
    "gfx942": (304, 5.3e12, 64 << 10, {"f16": 1300e12, "tf32": 650e12, "f32": 160e12, "f64": 80e12}),
}
# arch -> single-precision operations a clock and core; a core is taken at 3 GHz
_CPUS = {"avx512": 32, "avx2": 32, "neon": 16, "generic": 8}


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device.

    Examples
    --------
    >>> t = Target.parse("cuda:sm_90")
    >>> str(t), t.processors
    ('cuda:sm_90:132', 132)
    >>> Target.parse(str(t)) == t
    True
    """

    kind: str
    arch: str
    processors: int

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``kind[:arch[:processors]]``; what is left out is the host's (CPU) or the architecture's usual one."""
        kind, _, rest = text.partition(":")
        arch, _, count = rest.partition(":")
        if kind not in KINDS:
            raise InvalidArgument(
                "target", repr(text), "cpu, cuda:sm_NN or hip:gfxNNN, with :processors if wished"
            )
        if count and not (count.isdigit() and int(count)):
            raise InvalidArgument(
                "target", repr(text), "a positive number of processors after the second colon"
            )
        if kind == "cpu":
            arch = arch or _host_arch()
            if arch not in _CPUS:
                raise InvalidArgument("target", repr(text), "cpu:" + ", cpu:".join(_CPUS))
            return cls(kind, arch, int(count) if count else os.cpu_count() or 1)
        arch = arch or ("sm_90" if kind == "cuda" else "gfx942")
        if not re.fullmatch(r"sm_\d+" if kind == "cuda" else r"gfx\w+", arch):
            raise InvalidArgument("target", repr(text), "an architecture such as cuda:sm_90 or hip:gfx942")
        return cls(kind, arch, int(count) if count else _gpu_facts(arch)[0])

    @classmethod
    def of(cls, device: Any) -> Target:
        """Target of a framework device; `DeviceUnavailable` says what there is where it is missing."""
        import torch

        device = torch.device(device)
        if device.type == "cpu":
            return cls("cpu", _host_arch(), torch.get_num_threads())
        if device.type != "cuda":
            raise InvalidArgument("device", device.type, "cpu or cuda")
        if not torch.cuda.is_available():
            raise DeviceUnavailable(
                "device 'cuda': this machine has no usable NVIDIA or AMD GPU; use device 'cpu'"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            have = f"this machine has {torch.cuda.device_count()} GPU(s), counted from 0"
            raise DeviceUnavailable(f"device 'cuda:{index}': {have}")
        return _of_cuda(index)

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}:{self.processors}"

    @property
    def is_gpu(self) -> bool:
        """Whether it is not a CPU."""
        return self.kind != "cpu"

    @property
    def capability(self) -> int:
        """Number in ``sm_NN``; 0 elsewhere."""
        return int(self.arch[3:]) if self.kind == "cuda" else 0

    @property
    def bandwidth(self) -> float:
        """Bytes a second to memory."""
        return _gpu_facts(self.arch)[1] if self.is_gpu else 10e9 * min(self.processors, 16)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory a block may use (a core's cache on a CPU)."""
        return _gpu_facts(self.arch)[2] if self.is_gpu else 1 << 20

    def flops(self, dtype: str, math: str = "ieee") -> float:
        """Multiply and add operations a second for operands of this data type under this math mode."""
        if not self.is_gpu:
            return self.processors * 3e9 * _CPUS[self.arch] / (2 if dtype == "f64" else 1)
        narrow = {"f16": 1, "bf16": 1, "f8e4m3": 2, "f8e5m2": 2, "i8": 2}
        rates = _gpu_facts(self.arch)[3]
        if dtype in narrow:
            return rates["f16"] * narrow[dtype]
        return rates["tf32" if (dtype, math) == ("f32", "tf32") else "f64" if dtype == "f64" else "f32"]


def _gpu_facts(arch: str) -> tuple[int, float, int, dict[str, float]]:
    """Facts of the architecture, or of its nearest older relative where it is not listed."""
    if arch in _GPUS or not arch.startswith("sm_"):
        return _GPUS.get(arch, _GPUS["gfx90a"])
    older = [a for a in _GPUS if a.startswith("sm_") and int(a[3:]) <= int(arch[3:])]
    return _GPUS[max(older, key=lambda a: int(a[3:]), default="sm_80")]


@functools.cache
def _of_cuda(index: int) -> Target:
    import torch

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Target("cuda", f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)


@functools.cache
def _host_arch() -> str:
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = set(next((line for line in file if line.startswith("flags")), "").split())
    except OSError:  # not Linux: the portable code paths are right everywhere
        flags = set()
    return "avx512" if "avx512f" in flags else "avx2" if {"avx2", "fma"} <= flags else "generic"
