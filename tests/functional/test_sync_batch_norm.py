"""Batch normalization over two processes against the framework's own of the whole batch in one.

The test is one of the processes and starts this file as the other.
"""

from __future__ import annotations

import datetime
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as TF

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument

SPLITS = ((2, 3), (5, 0))  # images of either process


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"x": (5, 4, 3, 2), "dy": (5, 4, 3, 2), "weight": (4,), "bias": (4,), "mean": (4,), "var": (4,)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return made | {"x": made["x"] * 2 + 30.0, "var": made["var"].abs()}


def results(normalize, t: dict[str, torch.Tensor], part: slice) -> list[torch.Tensor]:
    """y, the gradients of input, weight and bias, and the running statistics."""
    x, weight, bias = (t[name].clone().requires_grad_() for name in ("x", "weight", "bias"))
    mean, var = t["mean"].clone(), t["var"].clone()
    y = normalize(x[part], mean, var, weight, bias, True, 0.3, 1e-3)
    y.backward(t["dy"][part])
    return [y.detach(), x.grad[part], weight.grad, bias.grad, mean, var]


def both_splits(rank: int, meeting: str) -> list[list[torch.Tensor]]:
    limit = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", f"file://{meeting}", world_size=2, rank=rank, timeout=limit)
    try:
        parts = [(slice(0, split[0]), slice(split[0], 5))[rank] for split in SPLITS]
        return [results(F.sync_batch_norm, batch(), part) for part in parts]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="the framework was built without processes")
def test_two_processes_are_one_batch(tmp_path):
    meeting, answer = tmp_path / "meeting", tmp_path / "answer"
    other = subprocess.Popen([sys.executable, __file__, str(meeting), str(answer)])
    try:
        here = both_splits(0, str(meeting))
        assert other.wait(60) == 0
    finally:
        other.kill()
    there = torch.load(answer)
    want = results(TF.batch_norm, batch(), slice(None))
    for mine, others in zip(here, there, strict=True):
        joined = [torch.cat((mine[0], others[0])), torch.cat((mine[1], others[1])), mine[2] + others[2]]
        joined += [mine[3] + others[3], mine[4], mine[5]]
        for got, expected in zip(joined, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(mine[4], others[4]) and torch.equal(mine[5], others[5])


def test_one_process_and_bad_arguments():
    t = batch()
    for got, want in zip(
        results(F.sync_batch_norm, t, slice(None)), results(F.batch_norm, t, slice(None)), strict=True
    ):
        assert torch.equal(got, want)
    with pytest.raises(InvalidArgument, match="input: found float"):
        F.sync_batch_norm(1.0, None, None)
    with pytest.raises(InvalidArgument, match="running_var: found None"):
        F.sync_batch_norm(t["x"], t["mean"], None, training=True)


if __name__ == "__main__":
    torch.save(both_splits(1, sys.argv[1]), sys.argv[2])
