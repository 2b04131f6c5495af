"""How an operation becomes a framework operator: schema, kernel, fake function, gradient; one mechanism for all.

Every operator ``torch.ops.lucidnn.NAME`` is an `Op`. It is reached by two roads that end in the same kernel:

* through the framework's dispatcher, whenever something has to see the call: compilation, tracing, fake tensors,
  functorch transforms, tensor subclasses, torch-function or dispatch modes, forward-mode differentiation;
* directly from Python when nothing does, because each trip through the dispatcher into Python costs microseconds.

Gradients of all operators go through one `torch.autograd.Function`, whose backward calls other operators of the
library, so that a second backward works by the same means.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _functorch  # type: ignore[attr-defined]
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from .. import memory
from ..backends import effective
from ..core import plan as planning
from ..core import settings
from ..core.descriptor import (
    DTYPES,
    TensorDescriptor,
    channels_last_strides,
    contiguous_strides,
    is_channels_last,
    short_dtype,
)
from ..core.errors import InvalidArgument, NotSupported
from ..core.operation import Epilogue, Operation
from ..core.problem import Problem
from ..core.target import Target

library = torch.library.Library("lucidnn", "DEF")
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
# Looked up once: they are asked on every call.
_is_compiling, _transform, _trace = (
    torch.compiler.is_compiling,
    _functorch.peek_interpreter_stack,
    torch._C._get_tracing_state,
)
_is_dynamo = torch.compiler.is_dynamo_compiling
_guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
LOOKS_KEPT = 32  # plans under one key of `_plans`: calls that differ in other shapes than the first, types, strides
# By what is cheap to ask of a call: checks of the looks, whether gradients are wanted then, and the plans.
_plans: dict[Any, tuple[tuple[Callable[..., bool], bool, Callable[..., Any]], ...]] = {}


def unseen(tensors: Sequence[Any]) -> bool:
    """Whether no part of the framework needs to see a call on these tensors (None entries are skipped)."""
    if (
        _is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _trace() is not None
    ):
        return False
    for t in tensors:  # noqa: SIM110  (a loop is twice as fast as all() over a generator)
        if t is not None and type(t) not in _PLAIN:
            return False
    return True


Described = tuple[Operation, dict[str, Any]]
"""An operation and what `Problem.create` takes beside it: ``tensors`` (role to tensor or descriptor, outputs may be
among them), and, where they are not the usual ones, ``epilogue`` and ``engine``."""


class Planned(NamedTuple):
    """A kernel that launches one plan.

    ``describe(tensors, attributes)`` says what a call means (`run`), ``math(tensor)`` the math mode, of the first
    tensor; ``finish(tensors, attributes, result)`` makes the operator's outputs of the plan's, where they differ.
    """

    describe: Callable[[Sequence[Any], Any], Described]
    math: Callable[[torch.Tensor], str] | None = None
    finish: Callable[[Sequence[Any], Any, Any], Any] | None = None


class Op:
    """One operator.

    Parameters
    ----------
    schema : str
        Tensors come first, then attributes.
    tensors : int
        Number of leading tensor arguments (optional ones included).
    kernel : Planned or callable
        Computes on real tensors, for every device.
    fake : callable
        Shapes, types and strides only.
    backward : callable
        ``backward(needs, args, outputs, grads)`` gives a gradient (or None) for each of the leading tensors.
    saves_output : callable, optional
        ``saves_output(args)``: whether backward reads the outputs, or which of them, as a tuple of their numbers.
    differentiable : int, optional
        How many of the outputs, counted from the first, have a gradient; all of floating point if left out.
    unread : callable, optional
        ``unread(args)``: numbers of the leading tensors that backward does not read; it finds None there.
    """

    def __init__(
        self,
        schema: str,
        tensors: int,
        kernel: Planned | Callable[..., Any],
        fake: Callable[..., Any],
        backward: Callable[..., Any],
        saves_output: Callable[..., bool | tuple[int, ...]] | None = None,
        differentiable: int | None = None,
        unread: Callable[..., tuple[int, ...]] | None = None,
    ):
        self.name = schema.partition("(")[0]
        self.names = re.findall(r"Tensor\??(?:\(\w+!?\))? (\w+)", schema)
        self.tensors, self.backward, self.saves_output = tensors, backward, saves_output
        self.differentiable, self.unread = differentiable, unread
        self.planned = kernel if isinstance(kernel, Planned) else None
        self.kernel = self._launched if isinstance(kernel, Planned) else kernel
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            library.impl(self.name, self.kernel, key)
        library.impl(self.name, self._differentiable, "Autograd")
        torch.library.register_fake(f"lucidnn::{self.name}", fake, lib=library)
        self.overload = getattr(torch.ops.lucidnn, self.name).default

    def __call__(self, *args: Any) -> Any:
        count, planned = self.tensors, self.planned
        if planned and not _is_dynamo() and not _function_modes() and forward_ad._current_level < 0:
            math = planned.math and planned.math(args[0])
            return run(planned.describe, args[:count], args[count:], math, op=self)
        tensors = args[:count]
        if not unseen(tensors):
            return self.dispatched(tensors, args[count:])
        if _wants_gradient(tensors):
            return _apply((self, self.kernel, args, args[count:]), *tensors)
        return self.kernel(*args)

    def dispatched(self, tensors: Sequence[Any], attributes: Sequence[Any]) -> Any:
        """Go through the framework's dispatcher."""
        for name, t in zip(self.names, tensors, strict=False):
            if t is not None and not isinstance(t, torch.Tensor):
                raise InvalidArgument(name, type(t).__name__, "a torch tensor")
        return self.overload(*tensors, *attributes)

    def _launched(self, *args: Any) -> Any:
        """The kernel of an operator that is one plan."""
        describe, math, finish = self.planned  # type: ignore[misc]
        tensors, attributes = args[: self.tensors], args[self.tensors :]
        result = run(describe, tensors, attributes, math and math(args[0]))
        return finish(tensors, attributes, result) if finish else result

    def _differentiable(self, *args: Any) -> Any:
        """What the dispatcher calls where gradients may be wanted."""
        if forward_ad._current_level >= 0:
            for t in args[: self.tensors]:
                if t is not None and forward_ad.unpack_dual(t).tangent is not None:
                    raise NotSupported(f"{self.name} has no forward-mode derivative; accepted: reverse mode")
        if _wants_gradient(args[: self.tensors]):
            if _transform() is None:
                return _apply((self, self._below_autograd, args, args[self.tensors :]), *args[: self.tensors])
            # `torch.func` comes here once for each of its levels, of which this differentiates one; the levels below
            # are to find gradients switched on, which they are not inside the forward pass of a `Function`.
            below = torch.enable_grad()(self._below_autograd)
            with enable_single_level_autograd_function():
                return _apply((self, below, args, args[self.tensors :]), *args[: self.tensors])
        return self._below_autograd(*args)

    def _below_autograd(self, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args)


def _wants_gradient(tensors: Sequence[Any]) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


class Differentiable(torch.autograd.Function):
    """The gradient of every operator of the library."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Op, Callable[..., Any], Sequence[Any], tuple], *tensors: Any) -> Any:
        """``function(*given)`` computes: a kernel on all arguments, or a plan on the tensors that are there."""
        op, function, given, attributes = call
        args = (*tensors, *attributes)
        result = function(*given)
        outputs = result if isinstance(result, tuple) else (result,)
        if not outputs[0].is_floating_point():
            name = next(n for n, needed in zip(op.names, ctx.needs_input_grad[1:], strict=False) if needed)
            accepted = f"one that does not: a result of {outputs[0].dtype} has no gradient"
            raise InvalidArgument(name, "a tensor that requires a gradient", accepted)
        ctx.op, ctx.attributes, ctx.settings = op, attributes, settings.current()
        if op.unread and (unread := op.unread(args)):
            tensors = tuple(None if i in unread else t for i, t in enumerate(tensors))
        if op.saves_output and (wanted := op.saves_output(args)):
            kept = [outputs[i] for i in wanted] if isinstance(wanted, tuple) else outputs
            ctx.save_for_backward(*tensors, *kept)
        else:
            ctx.save_for_backward(*tensors)
        if len(outputs) > 1:
            fixed = outputs[op.differentiable :] if op.differentiable else ()
            ctx.mark_non_differentiable(*fixed, *[t for t in outputs if not t.is_floating_point()])
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, count = ctx.op, ctx.op.tensors
        for grad in grads:
            if grad is not None:
                break
        else:
            return (None,) * (1 + count)
        saved = ctx.saved_tensors
        args, outputs, needs = (*saved[:count], *ctx.attributes), saved[count:], ctx.needs_input_grad[1:]
        if ctx.settings is settings.current():
            return (None, *op.backward(needs, args, outputs, grads))
        # other settings than the forward's are in force here, perhaps because this is another thread
        with settings.using(ctx.settings):
            return (None, *op.backward(needs, args, outputs, grads))


# `Function.apply` first looks for functorch wrappers, for several microseconds; `unseen` has done that already.
_apply = super(torch.autograd.Function, Differentiable).apply  # type: ignore[misc]


def run(
    describe: Callable[[Sequence[Any], Any], Described],
    tensors: Sequence[Any],
    attributes: tuple[Any, ...] = (),
    math: str | None = None,
    into: tuple[Any, ...] = (),
    op: Op | None = None,
) -> Any:
    """Launch the plan for a call, building it where this kind of call is new.

    Plans are found by what is cheap to ask; the few under one key differ in the tensors' looks, which a `_check` tells.

    Parameters
    ----------
    describe : callable
        ``describe(tensors, attributes)`` says what the call means; asked on a miss only. It stands for the operation
        in the key.
    tensors : sequence of tensor or None
        Inputs in the operation's order; the first is there.
    attributes : tuple
        The operator's other arguments: with the tensors' looks and the settings they decide the problem.
    math : str, optional
        The problem's math mode.
    into : tuple of tensor
        What the last outputs are written to; `describe` has said that they look as they do. Only the outputs before
        them are made and returned.
    op : Op, optional
        The operator that a user has called and that nobody has seen yet: it records for a backward pass where that is
        wanted, and takes the road through the dispatcher where the framework needs to see the call.
    """
    inputs = []
    present = addresses = 0
    try:
        for t in tensors:
            present += present
            if t is not None:
                present += 1
                if op and type(t) not in _PLAIN:
                    return op.dispatched(tensors, attributes)
                inputs.append(t)
                addresses |= t.data_ptr()
    except RuntimeError:  # there is no such thing to be asked for
        if op and not unseen(tensors):
            return op.dispatched(tensors, attributes)
        for role, t in describe(tensors, attributes)[1]["tensors"].items():
            if isinstance(t, torch.Tensor) and (t.layout != torch.strided or t.is_nested):
                kind = "a nested tensor" if t.is_nested else f"a tensor of layout {t.layout}"
                raise InvalidArgument(role, kind, "a dense tensor, of layout torch.strided") from None
        raise
    odd = addresses & 15 and tuple([t.data_ptr() & 15 for t in inputs])
    chosen = effective(inputs[0].is_cuda)
    key = (describe, inputs[0].shape, attributes, chosen, math, present, odd)
    try:
        known = _plans.get(key, ())
    except TypeError:  # the dispatcher hands lists over; tuples can be a key
        hashable = tuple(tuple(a) if isinstance(a, list) else a for a in attributes)
        hash(hashable)  # the error of what never can be one
        return run(describe, tensors, hashable, math, into, op)
    for check, wanting, plan in known:  # noqa: B007
        if check(*inputs):
            break
    else:
        if op and not unseen(tensors):
            return op.dispatched(tensors, attributes)
        if any(t.is_neg() for t in inputs):  # the sign is still to be changed in memory
            return run(describe, [t if t is None else t.resolve_neg() for t in tensors], attributes, math, into, op)
        check, wanting = _check(inputs), any(t.requires_grad for t in inputs)
        try:
            operation, given = describe(tensors, attributes)
            plan = _build(operation, math, chosen, **given)
        except (InvalidArgument, NotSupported) as error:  # asked again, it costs no more than a plan does
            plan = _Refusal(error)
        if check(*inputs):
            planning.remember(_plans, key, (*known[1 - LOOKS_KEPT :], (check, wanting, plan)))
    if into:
        return _filling(plan, inputs, into)
    if op and op.planned:
        if finish := op.planned.finish:
            launch = plan
            plan = lambda *inputs: finish(tensors, attributes, launch(*inputs))  # noqa: E731
        if wanting and torch.is_grad_enabled():
            return _apply((op, plan, inputs, attributes), *tensors)
    return plan(*inputs)


class _Refusal:
    """What is kept in a plan's place where there is none."""

    def __init__(self, error: Exception):
        self.error = error

    def __call__(self, *inputs: torch.Tensor) -> Any:
        raise self.error.with_traceback(None)


def _check(inputs: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that says whether a call on other tensors goes the same way as one on these does now.

    They look alike (shape, strides, type, device), the framework needs to see both or neither, and the same ones
    require gradients. The framework's compiled graphs have such a check in C++, which takes all tensors at once
    in less time than one takes to say its shape in Python. That it compares what the dispatcher goes by makes it
    strict: one plan may be kept for several states, inference mode and none, say.
    """
    if _guards_are_known():
        guard = _guards(*inputs, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if guard(*inputs):  # not where a tensor is there twice
            return guard

    def looks(t: torch.Tensor) -> tuple[Any, ...]:
        return t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.requires_grad

    wanted = [looks(t) for t in inputs]
    return lambda *others: unseen(others) and [looks(t) for t in others] == wanted


@functools.cache
def _guards_are_known() -> bool:
    """Whether the framework has its check, and it tells apart what has to be told apart."""
    x = torch.zeros(2, 2, device="cpu")
    others = (x.T, x[:1], x.double(), x.clone().requires_grad_(), torch.nn.Parameter(x), torch.ops.aten._neg_view(x))
    try:
        check = _guards(x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check(x) and check(x.clone()) and not any(check(other) for other in others)
    except Exception:
        return False


def _filling(plan: Callable[..., Any], inputs: Sequence[Any], into: tuple[Any, ...]) -> Any:
    """Run a plan whose last outputs are there already; gives the others."""
    if not isinstance(plan, planning.Plan):  # shapes only
        made = plan(*inputs)[: -len(into)]
    else:
        made = memory.empties(plan._outputs[: -len(into)], inputs[0].device)
        plan.launch((*inputs, *made, *into))
    return made[0] if len(made) == 1 else tuple(made)


def _build(
    op: Operation,
    math: str | None,
    chosen: settings.Settings,
    tensors: dict[str, Any],
    epilogue: Epilogue = Epilogue(),
    engine: str | None = None,
) -> Callable[..., Any]:
    name, first = next(iter(tensors.items()))
    described = {}
    for role, t in tensors.items():
        if isinstance(t, torch.Tensor):
            if t.device != first.device:
                raise InvalidArgument(role, f"a tensor on {t.device}", f"{first.device}, where {name} is")
            t = TensorDescriptor.of(t)
        if t is not None:
            described[role] = t
    shapes_only = first.device.type == "meta"
    target = Target.parse("cpu") if shapes_only else Target.of(first.device)
    problem = Problem.create(op, described, target, epilogue, math)
    if shapes_only:
        return functools.partial(_shapes, [problem[role] for role in problem.outputs])
    with settings.using(chosen, **({} if engine is None else {"engine": engine})) as chosen:
        return planning.select(problem, chosen, first.device)


def _shapes(outputs: Sequence[TensorDescriptor], *inputs: torch.Tensor) -> Any:
    """What stands for a plan on meta tensors: outputs that are shapes only."""
    made = tuple(
        torch.empty_strided(t.shape, t.strides, dtype=getattr(torch, DTYPES[t.dtype][0]), device="meta")
        for t in outputs
    )
    return made[0] if len(made) == 1 else made


def last(t: torch.Tensor) -> bool:
    """Whether a tensor (fake ones too) is channels-last and not also channels-first."""
    return is_channels_last(t.shape, t.stride())


def dense(
    like: torch.Tensor, shape: Sequence[int], channels_last: bool, dtype: torch.dtype | None = None
) -> TensorDescriptor:
    """Descriptor of an output, of `like`'s type if no other is given, in one of the two dense layouts."""
    strides = channels_last_strides(shape) if channels_last else contiguous_strides(shape)
    return TensorDescriptor(short_dtype(dtype or like.dtype), tuple(shape), strides)


def new_empty(
    like: torch.Tensor, shape: Sequence[Any], channels_last: bool, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Uninitialised tensor in one of the two dense layouts, for fake functions: sizes may be symbolic."""
    if not channels_last:
        return like.new_empty(shape, dtype=dtype)
    order = [0, *range(2, len(shape)), 1]
    back = [0, len(shape) - 1, *range(1, len(shape) - 1)]
    return like.new_empty([shape[i] for i in order], dtype=dtype).permute(back)


def remembered(write_out: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Remember what a function makes of a call's arguments, no tensors among them: checks and defaults cost time.

    What cannot be a key (a list, a symbolic number) is written out anew; so is everything while a graph is compiled.
    """
    memo: dict[Any, tuple[Any, ...]] = {}

    @functools.wraps(write_out)
    def written(*given: Any) -> tuple[Any, ...]:
        if _is_dynamo():
            return write_out(*given)
        try:
            found = memo.get(given)
        except TypeError:
            return write_out(*given)
        if found is None:
            found = write_out(*given)
            planning.remember(memo, given, found)
        return found

    return written


def tuple_of(value: Any, count: int, name: str) -> tuple[int, ...]:
    """A number or a sequence of `count` numbers, as a tuple of that many.

    Examples
    --------
    >>> tuple_of(2, 3, "stride"), tuple_of([1, 2], 2, "stride")
    ((2, 2, 2), (1, 2))
    """
    if isinstance(value, (int, torch.SymInt)):
        return (value,) * count  # type: ignore[return-value]
    values = tuple(value) if isinstance(value, (tuple, list)) else None
    if values is None or len(values) not in (1, count) or not all(isinstance(v, (int, torch.SymInt)) for v in values):
        raise InvalidArgument(name, repr(value), f"a whole number, or {count} of them")
    return values * count if len(values) == 1 else values  # type: ignore[return-value]


def axes_of(value: Any, name: str) -> tuple[int, ...]:
    """An axis, or a sequence of axes, as a tuple.

    Examples
    --------
    >>> axes_of(-1, "dim"), axes_of([0, 2], "dim")
    ((-1,), (0, 2))
    """
    if isinstance(value, int):
        return (value,)
    axes: tuple[Any, ...] = tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(axis, (int, torch.SymInt)) for axis in axes):
        raise InvalidArgument(name, repr(value), "a whole number or a sequence of them")
    return axes
