"""``lucidnn verify --accuracy``: every engine's error against float64, beside the framework's on the same inputs.

Four kinds of inputs (`lucidnn.testing.KINDS`): plain random ones; ones with a large mean, where sums cancel; ones over
a wide range, where a few terms decide; and ones with a NaN and infinities among them, which engines that transform
whole tiles or images spread further than the definition does: there the error is that of the finite elements, and how
many elements are of another kind than they should be is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

CLASSES = {  # note of an engine -> what it does to errors, the gravest first
    "reduced_precision": "sums in less than float32",
    "fft": "transforms images",
    "winograd": "transforms tiles",
    "tf32": "rounds to TF32 where allowed",
    "reference": "float64",
}


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """One contestant on one problem: by kind of input the worst error, and how many elements differ in kind."""

    problem: str
    engine: str  # empty for the framework
    name: str
    error_class: str
    bound: float
    errors: dict[str, float]
    strangers: dict[str, int]
    fault: str = ""


def error_class(engine: Any, problem: Any, config: Mapping[str, Any]) -> str:
    """What an engine's errors come from, in a few words. Where it is built on another, that one's notes count too."""
    from ..core import registry

    notes = engine.notes | (registry.get(config["engine"]).notes if "engine" in config else frozenset())
    for note, words in CLASSES.items():
        if note in notes and (note != "tf32" or problem.math == "tf32"):
            return words
    return "rounded sums of products"


def measure(problem: Any, device: Any, names: tuple[str, ...], configs: bool, seed: int) -> Iterator[Accuracy]:
    """The framework first, then every engine that takes the problem, by name."""
    import torch

    from .. import testing
    from ..core.descriptor import FLOATING
    from ..core.errors import NotSupported
    from ..core.plan import candidates
    from .peer import flags, peer
    from .terminal import settings_text

    sets = {}
    for kind in testing.KINDS:
        if kind == "plain" or problem.items[0][1].dtype in FLOATING:
            tensors = {role: testing.empty(t, device) for role, t in problem.items}
            testing.fill(problem, tensors, seed, kind)
            inputs = {role: tensors[role] for role in problem.inputs}
            sets[kind] = (inputs, testing.reference(problem, inputs, device))
    bound = max(testing.tolerance(problem, role) for role in problem.outputs)

    def row(engine: str, name: str, words: str, run: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Accuracy:
        errors, strangers, fault = {}, {}, ""
        try:
            for kind, (inputs, expected) in sets.items():
                found = run(inputs)
                pairs = [(out, expected[role]) for role, out in found.items()]
                errors[kind] = max(_finite_error(out, ref) for out, ref in pairs)
                strangers[kind] = sum(testing.strangers(out, ref) for out, ref in pairs)
        except Exception as error:
            fault = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Accuracy(str(problem), engine, name, words, bound, errors, strangers, fault)

    try:
        rival = peer(problem)
    except NotSupported as error:
        yield Accuracy(str(problem), "", "the framework", "", bound, {}, {}, str(error).splitlines()[0])
    else:
        with flags(problem):
            yield row("", rival.name, "", lambda inputs: _peer_results(problem, rival, inputs))
    for c in sorted(candidates(problem), key=lambda c: c.engine.name):
        if c.refusals or (names and c.engine.name not in names):
            continue
        for config in c.engine.configs(problem) if configs else [c.config]:

            def run(inputs: Mapping[str, Any], c: Any = c, config: Any = config) -> dict[str, Any]:
                outputs = {role: testing.empty(problem[role], device) for role in problem.outputs}
                size = c.engine.workspace_size(problem, config)
                workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
                c.engine.build(problem, config)((*inputs.values(), *outputs.values()), workspace)
                return outputs

            named = c.engine.name + (f" ({settings_text(dict(config))})" if configs and config else "")
            yield row(c.engine.name, named, error_class(c.engine, problem, config), run)


def _peer_results(problem: Any, rival: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    from .. import testing

    # Some of the framework's calls write into what they are given, or read the shape of an output.
    tensors = {role: t.clone() for role, t in inputs.items()}
    device = next(iter(inputs.values())).device
    tensors |= {role: testing.empty(problem[role], device) for role in problem.outputs}
    return rival.results(rival.prepare(tensors)())


def _finite_error(out: Any, ref: Any) -> float:
    """Relative error over the elements that are finite in both."""
    import torch

    out, ref = out.double(), ref.double()
    both = torch.isfinite(out) & torch.isfinite(ref)
    scale, difference = float(ref[both].norm()), float((out[both] - ref[both]).norm())
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def show(rows: list[Accuracy]) -> None:
    """A table for each problem."""
    from .. import testing
    from .terminal import say, show_table

    for problem in dict.fromkeys(row.problem for row in rows):
        own = [row for row in rows if row.problem == problem]
        kinds = [kind for kind in testing.KINDS if any(kind in row.errors for row in own)]
        lines = []
        for row in own:
            if row.fault:
                lines.append((row.name, row.error_class, f"!{row.fault}", *[""] * (len(kinds) - 1)))
                continue
            cells = []
            for kind in kinds:
                other = row.strangers[kind]
                cells.append(f"{row.errors[kind]:.2e}" + (f" +{other} elsewhere" if other else ""))
            lines.append((row.name, row.error_class, *cells))
        say(problem, style="bold")
        show_table(("engine", "errors come from", *(f">{kind}" for kind in kinds)), lines)
        say(f"The tests accept {own[0].bound:.2e} on plain inputs. '+n elsewhere': n elements are NaN or infinite and "
            "should not be, or the other way round.")  # fmt: skip
