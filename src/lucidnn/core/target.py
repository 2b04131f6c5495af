"""The hardware a problem is for: kind, architecture, number of processors, and from `devices.toml` its rates.

A target is parsed without the hardware being there (``Target.parse("cuda:sm_90")``), so that choices can be explained
and kernels compiled anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
import tomllib
from pathlib import Path
from typing import Any

from .descriptor import derived
from .errors import DeviceUnavailable, InvalidArgument

KINDS = {"cpu": "avx512|avx2|neon|generic", "cuda": "sm_[0-9]+", "hip": r"gfx\w+"}  # and their architectures' names
_USUAL = {"cuda": "sm_90", "hip": "gfx942"}
_RATES = {"f64": "f64", "f16": "f16", "bf16": "f16", "f8e4m3": "f8", "f8e5m2": "f8", "i8": "f8"}  # others: f32


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device.

    >>> t = Target.parse("cuda:sm_90")
    >>> str(t), t.processors
    ('cuda:sm_90:132', 132)
    """

    kind: str
    arch: str
    processors: int
    is_gpu: bool = derived()
    capability: int = derived()  # the number in sm_NN; 0 elsewhere
    bandwidth: float = derived()  # bytes a second to memory
    shared_memory: int = derived()  # bytes that a block may use (a core's cache on a CPU)

    def __post_init__(self):
        facts, is_gpu = _facts(self.arch), self.kind != "cpu"
        busy = 1 if is_gpu else min(self.processors, 16)  # cores that are taken to saturate a CPU's memory
        known = {"is_gpu": is_gpu, "bandwidth": facts["bandwidth"] * busy, "shared_memory": facts["shared_memory"]}
        vars(self).update(known, capability=int(self.arch[3:]) if self.kind == "cuda" else 0)

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``kind[:arch[:processors]]``; what is left out is the host's (CPU) or the architecture's usual one."""
        kind, _, rest = text.partition(":")
        arch, _, count = rest.partition(":")
        arch = arch or _USUAL.get(kind) or _host_arch()
        known = kind in KINDS and re.fullmatch(KINDS[kind], arch)
        if not known or not re.fullmatch("[0-9]*[1-9][0-9]*|", count):
            forms = "cpu, cpu:(avx512, avx2, neon or generic), cuda:sm_NN, hip:gfxNNN, then :processors if wished"
            raise InvalidArgument("target", repr(text), forms)
        usual = (os.cpu_count() or 1) if kind == "cpu" else _facts(arch)["processors"]
        return cls(kind, arch, int(count or usual))

    @classmethod
    def of(cls, device: Any) -> Target:
        """Target of a framework device; `DeviceUnavailable` says what there is where it is missing."""
        import torch

        device = torch.device(device)
        if device.type == "cpu":
            return cls("cpu", _host_arch(), torch.get_num_threads())
        if device.type != "cuda":
            raise InvalidArgument("device", device.type, "cpu or cuda")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            have = f"{count} GPU(s), counted from 0" if count else "no usable NVIDIA or AMD GPU; use device 'cpu'"
            raise DeviceUnavailable(f"device '{device}': this machine has {have}")
        found = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return cls("hip", found.gcnArchName.split(":")[0], found.multi_processor_count)
        return cls("cuda", f"sm_{found.major}{found.minor}", found.multi_processor_count)

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}:{self.processors}"

    def flops(self, dtype: str, math: str = "ieee") -> float:
        """Multiply and add operations a second for operands of this data type under this math mode."""
        rate = "tf32" if (dtype, math) == ("f32", "tf32") else _RATES.get(dtype, "f32")
        return _facts(self.arch)[rate] * (1 if self.is_gpu else self.processors)


@functools.cache
def _facts(arch: str) -> dict[str, Any]:
    """The table of an architecture in `devices.toml`, or of its nearest older relative where it is not listed."""
    known = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
    if arch in known or not arch.startswith("sm_"):
        return known.get(arch, known["gfx90a"])
    older = [int(a[3:]) for a in known if a.startswith("sm_") and int(a[3:]) <= int(arch[3:])]
    return known[f"sm_{max(older, default=80)}"]


@functools.cache
def _host_arch() -> str:
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    flags = cpuinfo("flags").split()
    return "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags and "fma" in flags else "generic"


def cpuinfo(field: str) -> str:
    """What Linux says of the first core; '' elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(field)), "")
    except OSError:
        return ""
