"""No Triton kernel may hold the loop that Triton miscompiles without a word.

Triton's front end finds the variables that a loop carries by tracing the body once and comparing each name's value
before and after. A name that enters with the very value of another and is assigned from that other inside looks
unchanged, and is taken for a constant: every later trip reads its first value. The cure is to derive it, or to start
it from another value.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "lucidnn"


def kernels(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions under a decorator whose text names triton's or gluon's jit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            if any(ast.unparse(d).split("(")[0] in ("triton.jit", "jit", "gluon.jit") for d in node.decorator_list):
                yield node


def assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Names that a simple statement assigns, with the expression each gets."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        yield statement.target.id, statement.value
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id, ast.BinOp(ast.Name(statement.target.id), statement.op, statement.value)
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value
            elif isinstance(target, ast.Tuple):
                same = isinstance(statement.value, ast.Tuple) and len(statement.value.elts) == len(target.elts)
                values = statement.value.elts if same else [statement.value] * len(target.elts)
                for part, value in zip(target.elts, values):
                    if isinstance(part, ast.Name):
                        yield part.id, value if same else ast.Subscript(value, part)


def inside(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.stmt):
                yield from assignments(node)


def suspects(kernel: ast.FunctionDef) -> list[str]:
    """Pairs ``a = b`` in a loop where a and b enter it with one value."""
    found: list[str] = []
    values: dict[str, str] = {}  # name -> text of what it holds, copies followed back

    def value(expression: ast.expr) -> str:
        if isinstance(expression, ast.Name):
            return values.get(expression.id, expression.id)
        return ast.unparse(expression)

    def visit(body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.For | ast.While):
                carried = {name for name, _ in inside(statement.body)}
                for name, source in inside(statement.body):
                    if not isinstance(source, ast.Name) or source.id not in carried or name == source.id:
                        continue
                    if name in values and values.get(name) == values.get(source.id):
                        found.append(f"line {statement.lineno}: {name} = {source.id}, both enter as {values[name]}")
            for part in ("body", "orelse"):
                visit(getattr(statement, part, []))
            for name, source in list(assignments(statement)):
                values[name] = value(source)

    visit(kernel.body)
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_kernel_loses_a_loop_variable(path: Path) -> None:
    for kernel in kernels(ast.parse(path.read_text(encoding="utf-8"))):
        assert not suspects(kernel), kernel.name


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_device_functions_return_in_one_place(path: Path) -> None:
    """Triton 3.6 holds all of a function's returns to one type, also those on roads that a constant closes."""
    for kernel in kernels(ast.parse(path.read_text(encoding="utf-8"))):
        returns = [node.lineno for node in ast.walk(kernel) if isinstance(node, ast.Return)]
        assert len(returns) <= 1, f"{kernel.name} returns on lines {returns}"


def test_kernels_are_found() -> None:
    names = [k.name for path in SOURCE.rglob("*.py") for k in kernels(ast.parse(path.read_text(encoding="utf-8")))]
    assert {"conv_gather", "conv_wgrad", "activate"} <= set(names)


BODIES = {
    "    i = 0\n    old = i\n    for _ in range(n):\n        use(old)\n        old = i\n        i += 1\n": True,
    "    i, old = 0, 0\n    for _ in range(n):\n        if n > 2:\n            old = i\n        i = i + 1\n": True,
    "    i = n\n    i += 1\n    j = i\n    for _ in range(n):\n        j = i\n        i *= 2": True,
    "    i = 0\n    old = -1\n    for _ in range(n):\n        old = i\n        i += 1\n": False,
    "    i = 0\n    old = i\n    for _ in range(n):\n        old = i - 1\n        i += 1\n": False,
    "    i = 0\n    for _ in range(n):\n        old = i\n        i += 1\n": False,
}


@pytest.mark.parametrize("body", BODIES)
def test_the_pattern_is_recognised(body: str) -> None:
    (kernel,) = kernels(ast.parse("@triton.jit\ndef kernel(n):\n" + body))
    assert bool(suspects(kernel)) == BODIES[body]
