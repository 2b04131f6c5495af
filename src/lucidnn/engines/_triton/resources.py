"""What a compiled kernel needs and uses: registers, spills, shared memory, matrix instructions. No GPU is asked.

For NVIDIA GPUs the numbers come from the machine code, through the disassemblers that Triton's own package carries;
for AMD GPUs from the assembly text.  For tests and for a reader's curiosity; nothing at run time depends on it.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

_MATRIX = re.compile(r"\b(HMMA|HGMMA|IMMA|DMMA|QMMA|QGMMA|UTCHMMA|UTCQMMA|OMMA)\b|\b(v_mfma\w*|v_smfmac\w*|v_wmma\w*)")
_COPY = re.compile(r"\b(LDGSTS|UTMALDG|UBLKCP)\b")


@dataclasses.dataclass(frozen=True)
class Resources:
    """Facts of one compiled kernel.

    Attributes
    ----------
    registers : int
        A thread's.
    spills : int
        Instructions that move a register to or from local memory.
    shared : int
        Bytes a block.
    matrix : dict of str to int
        Matrix instructions and how often they stand in the code.
    async_copies : int
        Copies to shared memory that bypass the registers.
    loop_stores : int
        Stores to shared memory inside loops (0 on AMD GPUs, where it is not counted): operands that take the way
        through registers.
    lost : int
        Copies of a register to one that is written again before it is read (0 on AMD GPUs): none is left in good code,
        and where the assembler of CUDA 12.8 lost an address, the copy of its other part stood there alone.
    """

    registers: int
    spills: int
    shared: int
    matrix: dict[str, int]
    async_copies: int
    loop_stores: int
    lost: int = 0


def resources(kernel: Any) -> Resources:
    """Facts of a ``CompiledKernel``.

    Raises
    ------
    FileNotFoundError
        Triton's package has no disassembler.
    """
    if kernel.metadata.target.backend == "hip":
        code = kernel.asm["amdgcn"]
        registers = sum(int(n) for n in re.findall(r"\.(?:vgpr|agpr)_count:\s*(\d+)", code))
        spills = sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s*(\d+)", code))
    else:
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            code = _output(tools / "nvdisasm", "-c", file.name)
            usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        registers = max(int(n) for n in re.findall(r"REG:(\d+)", usage))
        spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    code = re.sub(r"\bHGMMA\S+ RZ, gdesc\[URZ\].*", "", code)  # a stand-in for one that the assembler took out
    matrix = collections.Counter(a or b for a, b in _MATRIX.findall(code))
    copies = len(_COPY.findall(code))
    stores = sum(len(re.findall(r"\bSTSM?\b", body)) for body in _loops(code))
    return Resources(registers, spills, kernel.metadata.shared, dict(matrix), copies, stores, _lost(code))


_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")


def _lost(code: str) -> int:
    """Copies (``MOV``) in NVIDIA machine code whose target is written again, in the same block, before it is read.

    Whatever an instruction names counts as read, with the three registers behind it, as it may mean a pair or a quad.
    """
    pending: set[int] = set()  # registers that hold a copy not read so far
    found = 0
    for line in code.splitlines():
        match = _INSTRUCTION.match(line)
        if not match or match[2].startswith(("BRA", "EXIT", "CALL", "RET", "BSYNC", "HGMMA", "HMMA")):
            pending.clear()
            continue
        predicate, name, operands = match.groups()
        first, _, others = operands.partition(",")
        target = re.fullmatch(r"\s*R(\d+)", first)
        stores = name.startswith(("ST", "RED", "ATOM", "LDGSTS", "UTMA"))
        for number in map(int, re.findall(r"\bR(\d+)", others if target and not stores else operands)):
            pending -= set(range(number, number + 4))
        if target and not stores:
            number = int(target[1])
            found += number in pending and not predicate
            pending -= set(range(number, number + 4))
            if not predicate and re.fullmatch(
                r"IMAD\.MOV\.U32\s+.*RZ, RZ, R\d+\s*|MOV\s+R\d+, R\d+\s*", f"{name} {operands}"
            ):
                pending.add(number)
    return found


def _loops(code: str) -> list[str]:
    """Bodies of innermost loops in NVIDIA machine code: from a label to a conditional branch back to it."""
    labels, found = {}, []
    lines = code.splitlines()
    for number, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = number
        branch = re.search(r"@\S+\s+BRA.*`\((\.L_x_\d+)\)", line)
        if branch and branch[1] in labels:
            found.append((labels[branch[1]], number))
    inner = [(a, b) for a, b in found if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in found)]
    return ["\n".join(lines[a : b + 1]) for a, b in inner]


def assembler_log(kernel: Any) -> str:
    """What ptxas says about a kernel for an NVIDIA GPU; C7515 in it means that all its wgmma are serialised."""
    from triton.backends.nvidia.compiler import get_ptxas  # which of its two assemblers serves an architecture

    capability = kernel.metadata.target.arch
    assembler = get_ptxas(capability).path
    suffix = "a" if capability >= 90 else ""
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [assembler, "-v", f"--gpu-name=sm_{capability}{suffix}", file.name, "-o", "/dev/null"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def _output(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
