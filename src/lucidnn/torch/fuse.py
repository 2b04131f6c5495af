"""Chains of layers in a model that is there already, made one kernel each: `fuse`.

By what is known as symbolic tracing (``torch.fx``): the model runs once on stand-ins for tensors, which writes its
calls down as a graph; chains in the graph are replaced by one module of `lucidnn.nn`; and the graph is a module again.
A chain is a convolution, a batch normalization, an addition and an activation, each of the four but the first two
optional. In inference the normalization goes into the filters. In training, where its statistics are the batch's, the
convolution stays alone and the rest is one kernel, and one in the backward pass.

A link is taken only where nobody else sees what it joins, and where no tensor that the chain reads is changed in place
between the place it was read and the chain's end, at which all of it is computed now.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import operator
from typing import Any

import torch

from .. import functional
from .. import nn as layers
from ..core.errors import InvalidArgument, NotSupported
from ..nn.activation import FUNCTIONS, activation_of, from_call
from ..nn.sequence import fold
from ._tracing import CALLS, Storages, Tracer, in_place, untraceable

Node = torch.fx.Node

CONVOLUTIONS: dict[Any, Any] = {
    torch.nn.Conv1d: layers.ConvAct1d,
    torch.nn.Conv2d: layers.ConvAct2d,
    torch.nn.Conv3d: layers.ConvAct3d,
    torch.nn.ConvTranspose1d: layers.ConvTransposeAct1d,
    torch.nn.ConvTranspose2d: layers.ConvTransposeAct2d,
    torch.nn.ConvTranspose3d: layers.ConvTransposeAct3d,
}
NORMALIZATIONS: dict[Any, Any] = {
    torch.nn.BatchNorm1d: layers.BatchNormAct1d,
    torch.nn.BatchNorm2d: layers.BatchNormAct2d,
    torch.nn.BatchNorm3d: layers.BatchNormAct3d,
}
ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
METHODS = {name: name.rstrip("_") for name in ("relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_")}


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What `fuse` did, as plain data; as text it is a line for each chain."""

    training: bool
    fused: tuple[dict[str, Any], ...]
    """Entries ``{"name", "layers", "operation", "end"}``: the new layer, those it took the place of, why no more."""
    left: tuple[dict[str, Any], ...]
    """Entries ``{"name", "kind", "reason"}``: convolutions and normalizations as they were."""

    def __str__(self) -> str:
        count = sum(len(entry["layers"]) for entry in self.fused)
        lines = [f"for {'training' if self.training else 'inference'}: {count} layers in {len(self.fused)} kernels"]
        for entry in self.fused:
            lines.append(f"  {entry['name']}: {entry['operation']}  ({', '.join(entry['layers'])})")
        lines += [f"  {e['name']}: {e['kind']} as before, {e['reason']}" for e in self.left]
        return "\n".join(lines)


class FusedModule(torch.fx.GraphModule):
    """What `fuse` makes: a graph module with `fusion`, which says what was fused and what was not."""

    fusion: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.fusion = self.fusion
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (*super().__reduce__(), self.fusion)


def _unpickled(make: Any, args: tuple[Any, ...], fusion: Fusion) -> FusedModule:
    """What the framework makes of a pickled graph module is of its own class."""
    made = make(*args)
    fused = FusedModule(made, made.graph, args[0].get("_graphmodule_cls_name", "FusedModule"))
    fused.fusion = fusion
    return fused


class ConvolutionCall(torch.nn.Module):
    """A functional convolution and its activation; a module, because tracing keeps those whole."""

    def __init__(self, function: str, name: str, parameter: float):
        super().__init__()
        self.function, self.name, self.parameter = function, name, parameter

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take what the framework's function takes."""
        call = getattr(functional, self.function)
        return call(*args, **kwargs, activation=self.name, parameter=self.parameter)

    def extra_repr(self) -> str:
        """The function's name and the activation's."""
        return f"{self.function}, activation={self.name}"


def fuse(model: torch.nn.Module, *, training: bool | None = None) -> FusedModule:
    """Make one kernel of each chain of convolution, batch normalization, addition and activation in a model.

    Parameters
    ----------
    model : torch.nn.Module
        One that ``torch.fx`` can trace: no decision of its ``forward`` hangs on a tensor. It is not changed.
    training : bool, optional
        What the result is for; as the model's ``training`` if left out.

    Returns
    -------
    FusedModule
        A ``torch.fx.GraphModule``. Its attribute `fusion` says what was fused and what was not and why: as text
        (``print(fused.fusion)``) and as data (`Fusion`). It shares the model's parameters and buffers, except for the
        convolutions that took up a normalization, which have their own. For training the parameters have the names
        that they had; for inference a folded convolution has its own ``weight`` and ``bias`` and its normalization has
        none.

    Raises
    ------
    NotSupported
        The model cannot be traced; the message says in which part and what helps.

    Notes
    -----
    For inference (``model.eval()``), ``act(norm(conv(x)) + z)`` is one convolution with other filters. For training
    the convolution stays and ``act(norm(y) + z)`` is one kernel, whose running statistics move as the framework's do.
    A convolution without a normalization takes its addition and activation in both cases. Not touched: layers whose
    result is used elsewhere as well, modules that are called more than once, modules with hooks, subclasses.
    What tracing fixes is fixed: values of ``self.training`` that ``forward`` asks for, for one.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    >>> fused = fuse(model)
    >>> print(fused.fusion)
    for inference: 3 layers in 1 kernels
      0: conv + batch_norm (folded) + relu  (0, 1, 2)
    >>> sorted(fused.state_dict())
    ['0.bias', '0.weight']
    >>> x = torch.randn(2, 3, 8, 8)
    >>> torch.allclose(fused(x), model(x), atol=1e-5)
    True
    >>> print(fuse(model.train()).fusion)
    for training: 2 layers in 1 kernels
      1: batch_norm + relu  (1, 2)
      0: Conv2d as before, the normalization after it, 1, is trained
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument("model", type(model).__name__, "a torch.nn.Module")
    # Modules are copied, since names and modes change; tensors are not.
    tensors = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    root = copy.deepcopy(model, tensors)
    if training is not None and training != model.training:
        root.train(training)
    tracer = Tracer()
    try:
        graph = tracer.trace(root)
    except Exception as error:  # whatever a model's own code raises on stand-ins
        raise NotSupported(untraceable(model, tracer, error)) from error
    rewriting = _Rewriting(root, graph)
    rewriting.run()
    fused = FusedModule(root, graph, type(model).__name__)
    fused.training = root.training
    fused.fusion = Fusion(root.training, tuple(rewriting.fused), tuple(rewriting.left))
    return fused


@dataclasses.dataclass
class _Chain:
    """What is to be one kernel."""

    nodes: list[Node]
    words: list[str]
    conv: Any = None  # the convolution module; None for a functional one or none
    norm: Any = None
    z: Node | None = None
    name: str = "identity"
    parameter: float = 0.0
    end: str = ""


class _Rewriting:
    """The graph of one model while chains are taken out of it."""

    def __init__(self, root: torch.nn.Module, graph: torch.fx.Graph):
        self.root, self.graph = root, graph
        self.modules = dict(root.named_modules())
        self._drop_identities()
        called = [node for node in graph.nodes if node.op == "call_module"]
        self.times = collections.Counter(id(self.modules[node.target]) for node in called)
        self.place = {node: at for at, node in enumerate(graph.nodes)}
        self.storage = Storages(graph, self.modules)
        self.changes = [node for node in graph.nodes if in_place(node, self.modules)]
        self.fused: list[dict[str, Any]] = []
        self.left: list[dict[str, Any]] = []

    def run(self) -> None:
        """Go through the graph once, in the order of the calls."""
        taken: set[Node] = set()
        for node in list(self.graph.nodes):
            if node in taken:
                continue
            chain = self._chain(node)
            if isinstance(chain, str):
                self.left.append({"name": _name(node), "kind": self._kind(node), "reason": chain})
            elif chain is not None:
                taken.update(chain.nodes)
                self._replace(chain)

    # ---- finding

    def _module(self, node: Any) -> Any:
        return self.modules[node.target] if node is not None and node.op == "call_module" else None

    def _kind(self, node: Node) -> str:
        module = self._module(node)
        return type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target))

    def _chain(self, node: Node) -> _Chain | str | None:
        """What starts at this call; as text why nothing does; None where nothing could."""
        module = self._module(node)
        if isinstance(module, (torch.nn.modules.conv._ConvNd, torch.nn.modules.batchnorm._BatchNorm)):
            if type(module).__module__.startswith("lucidnn."):
                return None
            if type(module) not in CONVOLUTIONS and type(module) not in NORMALIZATIONS:
                return "a kind that is not known here"
            if reason := self._unfit(node):
                return reason
        elif node.op != "call_function" or node.target not in CALLS:
            return None
        if type(module) in NORMALIZATIONS:
            chain = _Chain([node], ["batch_norm"], norm=module)
        else:
            chain = _Chain([node], ["conv"], conv=module)
            if reason := self._normalized(chain):
                return reason
        # A functional convolution takes no z: only a module can look at its shape when it runs.
        if (chain.conv is None and chain.norm is None) or self._added(chain):
            self._activated(chain)
        return chain if len(chain.nodes) > 1 else chain.end

    def _unfit(self, node: Node) -> str:
        """Why a module cannot be replaced, or nothing."""
        module = self._module(node)
        if self.times[id(module)] > 1:
            return f"the module is called {self.times[id(module)]} times"
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return "it has hooks"
        if len(node.args) + len(node.kwargs) != 1:
            return "it is called with more than its input"
        return ""

    def _next(self, chain: _Chain) -> Node | None:
        """The one call that sees the chain's result; `end` says what is wrong where there is none."""
        last = chain.nodes[-1]
        users = list(last.users)
        if len(users) != 1:
            chain.end = f"its result is used {len(users)} times"
            return None
        if users[0].op == "output":
            chain.end = "its result is the model's"
            return None
        chain.end = f"what follows is {users[0].name} ({self._kind(users[0])})"
        return users[0]

    def _normalized(self, chain: _Chain) -> str:
        """Take the normalization after a convolution; if it is to stay by itself, why."""
        follower = self._next(chain)
        norm = self._module(follower)
        if follower is None or type(norm) not in NORMALIZATIONS:
            return ""
        name = _name(follower)
        if chain.conv is None:
            return f"it is a function, and the normalization after it, {name}, a module"
        if self.root.training:
            return f"the normalization after it, {name}, is trained"
        if norm.training or norm.running_mean is None:
            return f"the normalization after it, {name}, uses the batch's statistics"
        if reason := self._unfit(follower):
            return f"of the normalization after it, {name}: {reason}"
        rank = chain.conv.weight.ndim - 2
        if not type(norm).__name__.endswith(f"{rank}d") or norm.num_features != chain.conv.out_channels:
            return f"the normalization after it, {name}, is for another shape"
        if self._changed(chain, follower):
            return f"its input is changed in place before {name}"
        chain.norm = norm
        chain.nodes.append(follower)
        chain.words.append("batch_norm (folded)")
        return ""

    def _added(self, chain: _Chain) -> bool:
        """Take the addition that follows, if one does; whether what comes then may be taken."""
        follower = self._next(chain)
        if follower is None or follower.op == "call_module" or follower.target not in ADDITIONS:
            return follower is not None
        operands = [*follower.args, *(v for k, v in follower.kwargs.items() if k in ("input", "other"))]
        others = [one for one in operands if one is not chain.nodes[-1]]
        if len(operands) != 2 or len(others) != 1 or set(follower.kwargs) - {"input", "other"}:
            chain.end = f"what follows is {follower.name}, which is more than a sum of two"
        elif not isinstance(others[0], Node):
            chain.end = f"{follower.name} adds a number"
        elif others[0] is operands[0] and follower.target in (operator.iadd, "add_"):
            chain.end = f"{follower.name} changes its other operand in place"
        elif self._changed(chain, follower):
            chain.end = f"its input is changed in place before {follower.name}"
        else:
            chain.z = others[0]
            chain.nodes.append(follower)
            chain.words.append("add")
            return True
        return False

    def _activated(self, chain: _Chain) -> None:
        follower = self._next(chain)
        if follower is None:
            return
        try:
            named = self._activation(follower, chain.nodes[-1])
        except (NotSupported, InvalidArgument, TypeError) as refusal:
            chain.end = str(refusal)
            return
        if named is None:
            return
        if self._changed(chain, follower):
            chain.end = f"its input is changed in place before {follower.name}"
            return
        chain.name, chain.parameter = named
        chain.nodes.append(follower)
        chain.words.append(chain.name)
        self._next(chain)

    def _activation(self, node: Any, x: Node) -> tuple[str, float] | None:
        module = self._module(node)
        if module is not None:
            if not type(module).__module__.startswith("torch.nn.modules.activation"):
                return None
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
                raise NotSupported(f"{_name(node)} has hooks")
            return activation_of(module)
        if node.op == "call_method":
            alone = len(node.args) == 1 and not node.kwargs
            return (METHODS[node.target], 0.0) if alone and node.target in METHODS else None
        if node.op != "call_function" or node.target not in FUNCTIONS:
            return None
        args, kwargs = list(node.args), dict(node.kwargs)
        if (args.pop(0) if args else kwargs.pop("input", None)) is not x:
            return None
        if any(isinstance(value, Node) for value in (*args, *kwargs.values())) or "out" in kwargs:
            raise NotSupported(f"{node.name} has arguments that are not numbers")
        return from_call(node.target, tuple(args), kwargs)

    def _changed(self, chain: _Chain, end: Node) -> bool:
        """Whether something that the chain reads first is changed before the chain's end, where it is read now."""
        first = chain.nodes[0]
        read = {self.storage(one): self.place[first] for one in first.all_input_nodes}
        if chain.z is not None:  # read by the addition, the last so far
            read.setdefault(self.storage(chain.z), self.place[chain.nodes[-1]])
        return any(
            read.get(self.storage(one), self.place[end]) < self.place[node] < self.place[end]
            for node in self.changes
            if node not in chain.nodes
            for one in (node, *node.all_input_nodes)
        )

    # ---- replacing

    def _replace(self, chain: _Chain) -> None:
        first, last = chain.nodes[0], chain.nodes[-1]
        function: Any = first.target
        with self.graph.inserting_after(last):
            if first.op == "call_module":
                self._exchange(chain)
                extra = () if chain.z is None else (chain.z,)
                given = (first.args[0] if first.args else next(iter(first.kwargs.values())), *extra)
                new = self.graph.call_module(function, given)
            else:
                name = f"{first.name}_{chain.name}"
                while hasattr(self.root, name):
                    name += "_"
                self.modules[name] = ConvolutionCall(function.__name__, chain.name, chain.parameter)
                self.root.add_module(name, self.modules[name])
                new = self.graph.call_module(name, first.args, first.kwargs)
        new.meta = dict(last.meta)
        last.replace_all_uses_with(new)
        self.place[new] = self.place[last]
        self.storage.same(new, last)
        names = [_name(node) for node in chain.nodes]
        for node in reversed(chain.nodes):
            self.graph.erase_node(node)
        self.changes = [node for node in self.changes if node not in chain.nodes]
        self.fused.append({"name": names[0], "layers": names, "operation": " + ".join(chain.words), "end": chain.end})

    def _exchange(self, chain: _Chain) -> None:
        """Put the module that does the whole chain where the first one was."""
        target: Any = chain.nodes[0].target
        old = chain.conv if chain.conv is not None else chain.norm
        new = _as_kind(old, {**CONVOLUTIONS, **NORMALIZATIONS}[type(old)], chain.name, chain.parameter)
        if chain.conv is not None and chain.norm is not None:
            with torch.no_grad():
                weight, bias = fold(chain.conv, chain.norm)
            new.weight = torch.nn.Parameter(weight, chain.conv.weight.requires_grad)
            new.bias = torch.nn.Parameter(bias, chain.conv.weight.requires_grad)
        parent, _, name = target.rpartition(".")
        setattr(self.root.get_submodule(parent), name, new)
        self.modules[target] = new

    def _drop_identities(self) -> None:
        for node in list(self.graph.nodes):
            module = self._module(node)
            if type(module) is torch.nn.Identity and len(node.args) == 1 and not module._forward_hooks:
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)


def _as_kind(old: Any, kind: Any, name: str, parameter: float) -> Any:
    """The same module, tensors included, as one of lucidnn's kind."""
    new = kind.__new__(kind)
    new.__dict__.update(old.__dict__)
    for table in ("_parameters", "_buffers", "_modules"):
        new.__dict__[table] = old.__dict__[table].copy()
    new.name, new.parameter = name, parameter
    return new


def _name(node: Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name
