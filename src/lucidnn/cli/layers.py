"""What a training step is made of: every plan, timed alone beside the framework's kernel; and the step as a whole."""

from __future__ import annotations

from typing import Any

import torch

from ..core import plan, timing
from ..core.problem import Problem
from .compare import compare
from .network import layer_of
from .peer import linear_peer
from .training import Images, Trainer

STEP_SETS = 4  # batches that the timed steps take in turn


def layers(trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor], rounds: int = 7) -> list[dict[str, Any]]:
    """Observe one training step and time each plan that it launched.

    Returns
    -------
    list of dict
        In the order of their launch, a row of `lucidnn.cli.compare.compare` with ``layer`` and ``what``, the
        operation with its epilogue.
    """
    device = trainer.recipe.device
    with plan.observe() as launched:
        trainer.step(*batch)
    rows = []
    for one in dict.fromkeys(launched):
        against = linear_peer(one.problem) if layer_of(one.problem) == "linear" else None
        (row,) = compare(one.problem, device, [one], against=against, rounds=rounds)
        rows.append({"layer": layer_of(one.problem), "what": described(one.problem), **row})
    return rows


def described(problem: Problem) -> str:
    """An operation with what is fused to it.

    Examples
    --------
    >>> described(Problem.parse("conv_fprop x=f32[1,3,8,8] w=f32[4,3,3,3] bias=f32[4] act=relu"))
    'conv_fprop + bias + relu'
    >>> described(Problem.parse("pointwise_bwd dy=f32[8] x=f32[8] act=relu"))
    'pointwise_bwd(relu)'
    """
    act = problem.epilogue.activation
    if problem.op.name.startswith("pointwise"):
        return f"{problem.op.name}({act})"
    fused = [*(["bias"] if "bias" in problem.inputs else []), *([act] if act != "identity" else [])]
    return " + ".join([problem.op.name, *fused])


def steps(ours: Trainer, theirs: Trainer, images: Images, rounds: int = 9) -> list[dict[str, Any]]:
    """Whole training steps of both networks, interleaved: eager, and on a GPU as replays of a captured graph."""
    device = ours.recipe.device
    batches = [batch for batch, _ in zip(images.batches(0), range(STEP_SETS), strict=False)]
    rows = []
    for graph in (False, True) if device.type == "cuda" else (False,):
        calls = {
            name: lambda s, trainer=trainer: trainer.step(*batches[s])
            for name, trainer in (("ours", ours), ("theirs", theirs))
        }
        sets = len(batches)
        times = timing.measure(calls, device, sets=sets, rounds=rounds, sample_seconds=0.05, graph=graph)
        mine, peer = times["ours"], times["theirs"]
        rows.append(
            {
                "how": "graph replay" if graph else "eager",
                "seconds": mine.median,
                "spread": round(mine.spread, 4),
                "peer_seconds": peer.median,
                "peer_spread": round(peer.spread, 4),
                "ratio": peer.median / mine.median,
            }
        )
    return rows
