"""Writing a model's calls down as a graph, and what in a graph may share memory or be changed in place."""

from __future__ import annotations

import operator
import traceback
from typing import Any

import torch
import torch.nn.functional as T

Node = torch.fx.Node

CALLS = (T.conv1d, T.conv2d, T.conv3d, T.conv_transpose1d, T.conv_transpose2d, T.conv_transpose3d)
"""Functional convolutions."""
AUGMENTED = frozenset(name.strip("_") for name in dir(operator) if name.startswith("__i")) - {"index", "inv", "invert"}
"""Names of the operators behind ``+=`` and its like."""


class _Proxy(torch.fx.Proxy):
    """Writes ``y += z`` down as what it is; the framework's makes ``y = y + z`` of it, which other names for y tell."""

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


class Tracer(torch.fx.Tracer):
    """Keeps lucidnn's own modules whole, and knows in which module a trace ended."""

    def __init__(self) -> None:
        super().__init__()
        self.within: list[tuple[str, str]] = []

    def proxy(self, node: Node) -> Any:
        return _Proxy(node, self)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__.startswith("lucidnn.") or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.within.append((self.path_of_module(m), type(m).__name__))
        result = super().call_module(m, forward, args, kwargs)
        self.within.pop()  # left where it is by an error
        return result


def untraceable(model: torch.nn.Module, tracer: Tracer, error: Exception) -> str:
    path, kind = tracer.within[-1] if tracer.within else ("", type(model).__name__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename.replace("\\", "/")]
    place = f", {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    where = f"in {path!r} ({kind})" if path else f"in its own forward ({kind})"
    return (
        f"fuse: {type(model).__name__} cannot be traced {where}{place}: {type(error).__name__}: "
        f"{str(error).splitlines()[0] if str(error) else 'no message'}; "
        "fuse the submodules that can be: model.part = lucidnn.torch.fuse(model.part)"
    )


def in_place(node: Any, modules: dict[str, Any]) -> bool:
    """Whether a call may change one of its operands."""
    if node.op == "call_module":
        return bool(getattr(modules[node.target], "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in AUGMENTED or name == "setitem" or (name.endswith("_") and not name.endswith("__")):
        return True
    return "out" in node.kwargs or node.kwargs.get("inplace") is True or any(one is True for one in node.args[1:])


class Storages:
    """Which tensors of a graph may share their memory: classes of nodes."""

    def __init__(self, graph: torch.fx.Graph, modules: dict[str, Any]):
        self.leader: dict[Node, Node] = {}
        for node in graph.nodes:
            if not fresh(node, modules):
                for one in node.all_input_nodes:
                    self.same(node, one)

    def __call__(self, node: Node) -> Node:
        while node in self.leader:
            node = self.leader[node]
        return node

    def same(self, a: Node, b: Node) -> None:
        """Join the classes of two."""
        a, b = self(a), self(b)
        if a is not b:
            self.leader[a] = b


def fresh(node: Any, modules: dict[str, Any]) -> bool:
    """Whether a call's result is surely memory of its own."""
    if node.op == "call_module":
        module = modules[node.target]
        made = (torch.nn.modules.conv._ConvNd, torch.nn.modules.batchnorm._BatchNorm, torch.nn.Linear)
        return isinstance(module, made)
    return node.op == "call_function" and (node.target in CALLS or node.target in (operator.add, torch.add, torch.cat))
