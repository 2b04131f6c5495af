"""Launches of Triton kernels, declared by an engine, compiled for a target without needing it, and started
with little work.

An engine's ``launches(problem, config)`` returns a list of `Launch`: a kernel, a grid and, for every kernel
parameter, a tensor role, a slice of the workspace, a number or a constexpr.  `Program` turns the list into
the function a plan calls.

Three ways to run one and the same list:

* compiled ahead of time for the problem's target through ``triton.compile`` (no GPU is asked for anything, so
  this also works where there is none), specialised as Triton's own just-in-time path would, only finer: the
  power of two up to 16 that divides an address or a number is made known (there: 16 or nothing), an integer 1
  becomes a constant, integers beyond 32 bits are passed as 64-bit, and so is every ``..._stride`` of a kernel whose
  constexpr ``WIDE`` is true;
* started through the compiled kernel's own launcher: per call only the addresses are filled into a copied
  argument list. A kernel is loaded once for each device that calls it; several threads and stream capture are
  fine;
* under ``TRITON_INTERPRET=1`` run by Triton's interpreter on CPU tensors (slow; a bfloat16 ``tl.dot`` is
  wrong there).

Compiled code is kept on disk by Triton itself.  Kernels that ask Triton for scratch memory get a part of the
workspace where the launch names one, else what Triton's allocator gives.  Triton 3.6 to 3.9.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import _allocation

from ...core.descriptor import TensorDescriptor
from ...core.engine import Config, Engine, Run
from ...core.problem import Problem
from ...core.target import Target
from ...ops.activation import ACTIVATIONS

TYPES = {
    "f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16", "f8e4m3": "fp8e4nv", "f8e5m2": "fp8e5",
    "i64": "i64", "i32": "i32", "i8": "i8", "u8": "u8", "bool": "i1",
}  # fmt: skip
INTERPRETED = bool(triton.knobs.runtime.interpret)
_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Slice:
    """Workspace from byte `offset` on (a multiple of 16), seen as elements of `dtype` (a short name)."""

    offset: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Real:
    """A floating-point argument of type ``f32`` or ``f64``."""

    value: float
    dtype: str = "f32"


Argument = str | Slice | Real | int | None
"""A tensor's role (None is passed where the problem has no such tensor), a workspace slice, or a number."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel start.

    Parameters
    ----------
    kernel : triton.JITFunction
    grid : tuple of int
        One to three sizes; the first may be up to 2^31 - 1, the others up to 65535.
    args : mapping of str to Argument
        By parameter name, every parameter that is not a constexpr.
    constexprs : mapping of str to object
        By parameter name.
    num_warps, num_stages : int
    scratch : Slice and int, or None
        For a kernel that Triton gives memory of its own, which tensor descriptors made in a kernel live in: where in
        the workspace, which has 127 bytes more for it to be aligned, and how many bytes a block.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Argument]
    constexprs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    scratch: tuple[Slice, int] | None = None

    def __post_init__(self):
        given, wanted = [*self.args, *self.constexprs], self.kernel.arg_names
        if sorted(given) != sorted(wanted):
            missing, unknown = set(wanted) - set(given), set(given) - set(wanted)
            twice = self.args.keys() & self.constexprs.keys()
            raise TypeError(f"{self.kernel.__name__}: missing {missing}, unknown {unknown}, given twice {twice}")
        if not 0 < self.grid[0] <= _INT32 or any(not 0 < g < 65536 for g in self.grid[1:]):
            raise ValueError(f"{self.kernel.__name__}: grid {self.grid} is outside what a GPU takes")

    def compile(self, problem: Problem, memo: bool = True) -> Any:
        """The kernel compiled for the problem's target: a ``CompiledKernel``, not loaded on any device.

        With `memo` false the object is a fresh one: loading ties it to one device. Either way Triton's disk
        cache is used.
        """
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], list[list]] = {}
        wide = self.constexprs.get("WIDE", False)
        for index, name in enumerate(self.kernel.arg_names):
            kind, divisor = "constexpr", 1
            if name in self.constexprs:
                constants[(index,)] = self.constexprs[name]
            else:
                value = self.args[name]
                kind, divisor = specialise(value, problem.tensors)
                if kind == "constexpr":
                    constants[(index,)] = None if isinstance(value, str) else value
                elif kind == "i32" and wide and name.endswith("_stride"):
                    kind = "i64"  # a step that fits times a small count that fits may not
            signature[name] = kind
            if divisor > 1:
                attributes[(index,)] = [["tt.divisibility", divisor]]
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        facts = (tuple(signature.items()), tuple(constants.items()), str(attributes), *options.values())
        key = (self.kernel, facts, problem.target.kind, problem.target.arch)
        with _lock:
            compiled = _compiled.get(key) if memo else None
            if compiled is None:
                source = ASTSource(self.kernel, signature, constants, attributes)
                compiled = triton.compile(source, target=gpu_target(problem.target), options=options)
                if memo:
                    _compiled[key] = compiled
        return compiled


_lock = threading.RLock()
_compiled: dict[Any, Any] = {}


def gpu_target(target: Target) -> GPUTarget:
    """Triton's name for a target."""
    if target.kind == "cuda":
        return GPUTarget("cuda", target.capability, 32)
    return GPUTarget("hip", target.arch, 64 if target.arch.startswith("gfx9") else 32)


def specialise(value: Argument, tensors: Mapping[str, TensorDescriptor]) -> tuple[str, int]:
    """Type in the kernel's signature, and the power of two, at most 16, that is known to divide address or
    number.
    """
    if isinstance(value, str):
        if value not in tensors:
            return "constexpr", 1
        return "*" + TYPES[tensors[value].dtype], tensors[value].alignment
    if isinstance(value, Slice):
        return "*" + TYPES[value.dtype], _power_of_two(value.offset)
    if isinstance(value, Real):
        return TYPES[value.dtype], 1
    if value is None or value == 1:
        return "constexpr", 1
    return ("i32" if -_INT32 - 1 <= value <= _INT32 else "i64"), _power_of_two(value)


def _power_of_two(number: int) -> int:
    """Largest power of two, at most 16, that divides a number.

    Examples
    --------
    >>> _power_of_two(24), _power_of_two(0), _power_of_two(-3)
    (8, 16, 1)
    """
    return min(number & -number, 16) or 16


def blend(problem: Problem) -> dict[str, Argument]:
    """Arguments `alpha`, `beta`, `parameter` of the epilogue's `finish`; None where a factor is 1 or a term
    absent.
    """
    epilogue = problem.epilogue
    dtype = "f64" if problem.items[0][1].dtype == "f64" else "f32"
    return {
        "alpha": None if epilogue.alpha == 1.0 else Real(epilogue.alpha, dtype),
        "beta": None if epilogue.beta in (0.0, 1.0) else Real(epilogue.beta, dtype),
        "parameter": None if ACTIVATIONS[epilogue.activation].parameter is None else Real(epilogue.parameter, dtype),
    }


class Program:
    """A list of launches for one problem, ready to be called with tensors: what a Triton engine's ``build``
    returns.

    ``program(tensors, workspace)`` takes the tensors in the order of ``problem.inputs + problem.outputs`` on
    one GPU and starts every launch on that GPU's current stream. Building compiles for the problem's target;
    where that GPU is the current one, it also loads, so that the first call may already be under stream
    capture.
    """

    def __init__(self, problem: Problem, launches: list[Launch]):
        self.problem = problem
        self.launches = launches
        self._steps: dict[int, list[tuple]] = {}
        if INTERPRETED:
            return
        self.kernels = [launch.compile(problem) for launch in launches]
        import torch

        if torch.cuda.is_available():
            device = torch.cuda.current_device()
            if Target.of(f"cuda:{device}").arch == problem.target.arch:
                self._load(device)

    def __call__(self, tensors: tuple[Any, ...], workspace: Any = None) -> None:
        if INTERPRETED:
            self._interpret(tensors, workspace)
            return
        device = tensors[-1].get_device()
        steps = self._steps.get(device)
        if steps is None:
            steps = self._load(device)
        if _current_device() == device:
            _start(steps, tensors, workspace, _current_stream(device))
        else:
            import torch

            with torch.cuda.device(device):
                _start(steps, tensors, workspace, _current_stream(device))

    def _load(self, device: int) -> list[tuple]:
        """Load every kernel on a device and note what each start needs."""
        global _current_device, _current_stream
        import torch

        if device < 0:
            raise RuntimeError(f"a program for {self.problem.target} was called with tensors on the CPU")
        with _lock, torch.cuda.device(device):
            if device in self._steps:
                return self._steps[device]
            _current_device = torch._C._cuda_getDevice
            _current_stream = torch._C._cuda_getCurrentRawStream
            steps = [_step(launch, self.problem, device) for launch in self.launches]
            self._steps[device] = steps
        return steps

    def _interpret(self, tensors: tuple[Any, ...], workspace: Any) -> None:
        import torch

        from ...core.descriptor import DTYPES

        named = {role: tensor for (role, _), tensor in zip(self.problem.items, tensors, strict=True)}
        for launch in self.launches:
            values = dict(launch.constexprs)
            for name, value in launch.args.items():
                if isinstance(value, str):
                    value = named.get(value)
                elif isinstance(value, Slice):
                    long, size = DTYPES[value.dtype]
                    end = value.offset + (workspace.numel() - value.offset) // size * size
                    value = workspace[value.offset : end].view(getattr(torch, long))
                elif isinstance(value, Real):
                    value = value.value
                values[name] = value
            launch.kernel[launch.grid](**values)


_current_device: Any = None
_current_stream: Any = None
_on_device: dict[Any, Any] = {}


def _loaded(launch: Launch, problem: Problem, device: int) -> Any:
    """The launch's kernel loaded on `device`, the current one; programs with the same kernel share it."""
    shared = launch.compile(problem)
    key = (shared.hash, device)
    kernel = _on_device.get(key)
    if kernel is None:
        kernel = launch.compile(problem, memo=False)
        _ = kernel.run  # makes the launcher and loads the binary
        _on_device[key] = kernel
    return kernel


def _step(launch: Launch, problem: Problem, device: int) -> tuple:
    """What `_start` needs: the function, its arguments around the stream, and where addresses go."""
    order = {role: index for index, (role, _) in enumerate(problem.items)}
    kernel = _loaded(launch, problem, device)
    values: list[Any] = []
    slots: list[tuple[int, int, int]] = []
    nested = _takes_nested_arguments(kernel.run)
    for name, kind in kernel.src.signature.items():
        if nested and kind == "constexpr":
            continue
        value = launch.args.get(name)
        if isinstance(value, str):
            if value in order:
                slots.append((len(values), order[value], 0))
            value = None
        elif isinstance(value, Slice):
            slots.append((len(values), len(order), value.offset))
            value = None
        elif isinstance(value, Real):
            value = value.value
        values.append(value)
    grid = (*launch.grid, 1, 1)[:3]
    asked, given = kernel.metadata.global_scratch_size, launch.scratch
    if given is not None and asked:
        if asked > given[1]:
            raise RuntimeError(
                f"{launch.kernel.__name__} needs {asked} bytes of scratch memory a block, has {given[1]}"
            )
        slots.append((len(values), len(order), given[0].offset))
        values.append(None)
        before = (kernel.function, kernel.packed_metadata, None, None, None)
        return _with_scratch(kernel.run), grid, before, False, values, slots
    if not nested:
        return (kernel.run, grid, (kernel.function, kernel.packed_metadata, None, None, None), False, values, slots)
    run = kernel.run
    passed = (kind != "constexpr" for kind in kernel.src.signature.values())
    annotations = [a for a, taken in zip(run.arg_annotations, passed) if taken]
    start = (kernel.function, run.launch_cooperative_grid, run.launch_pdl, kernel.packed_metadata)
    nothing = (None, None, None, None, None)  # launch metadata, two hooks, two kinds of scratch memory
    after = (*start, *nothing, annotations, run.kernel_signature)
    return run.launch, grid, after, True, values, slots


def _with_scratch(run: Any) -> Any:
    """A launcher whose last argument is the address of the scratch memory, up to 127 bytes early."""

    def start(*arguments: Any) -> None:
        address = arguments[-1] + 127 & -128
        before = _allocation._allocator.set(lambda size, alignment, stream: address)
        try:
            run(*arguments[:-1])
        finally:
            _allocation._allocator.reset(before)

    return start


def _takes_nested_arguments(run: Any) -> bool:
    """Whether the C function under the launcher can be called directly: a third of the time through the
    launcher.

    Its parameters are known for Triton 3.7 and 3.9 on NVIDIA GPUs; kernels that need scratch memory go
    through the launcher, which asks Triton's allocator for it.
    """
    return (
        triton.__version__.split(".")[:2] in (["3", "7"], ["3", "9"])
        and type(run).__name__ == "CudaLauncher"
        and not run.global_scratch_size
        and not run.profile_scratch_size
        and not getattr(run, "gsan_enabled", False)
    )


def _start(steps: list[tuple], tensors: tuple[Any, ...], workspace: Any, stream: int) -> None:
    addresses = [tensor.data_ptr() for tensor in tensors]
    addresses.append(0 if workspace is None else workspace.data_ptr())
    for call, grid, after, nested, values, slots in steps:
        values = values.copy()
        for at, source, offset in slots:
            values[at] = addresses[source] + offset
        if nested:
            call(*grid, stream, *after, values)
        else:
            call(*grid, stream, *after, *values)


class TritonEngine(Engine):
    """Base of engines whose whole work is a list of launches."""

    targets = ("cuda", "hip")
    notes = frozenset({"runtime_compilation"})

    @abc.abstractmethod
    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        """The kernels to start, in order."""

    def build(self, problem: Problem, config: Config) -> Run:
        return Program(problem, self.launches(problem, config))

    def source(self) -> bytes:
        """The engine's file and all of this folder: kernels are shared."""
        shared = sorted(Path(__file__).parent.glob("*.py"))
        return b"".join([super().source(), *(path.read_bytes() for path in shared)])
