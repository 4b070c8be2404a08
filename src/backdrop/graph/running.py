"""Batch normalisation by running statistics, in training too: the policy "running" of `backdrop.skip`.

    y = gamma * (x - m) / sqrt(v + eps) + beta,    then m <- m + momentum * (mean(x) - m), and v in the same way

with m and v as they were before the step, constants in the backward pass: no sample and no position depends on another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from backdrop.graph.trace import name_of


def running_batch_norm(
    input: Tensor,  # noqa: A002  # as F.batch_norm has it
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` in eval mode, whose running statistics then take up those of what it was given."""
    mean, variance = running_mean.clone(), running_var.clone()  # which autograd keeps
    y = F.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)
    take_up(input, running_mean, running_var, momentum)
    return y


def take_up(x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float) -> None:
    """Let running statistics take up those of x, (N, C, ...)."""
    if x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    with torch.no_grad():
        x = x.float() if x.dtype.itemsize < 4 else x
        variance, mean = torch.var_mean(x, [axis for axis in range(x.ndim) if axis != 1])
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(variance.to(running_var.dtype), momentum)


def with_running_statistics(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with every batch normalisation in training by its running statistics."""
    found = [node for node in module.graph.nodes if node.op == "call_function" and node.target is F.batch_norm]
    for node in found:
        if not (node.args[5] if len(node.args) > 5 else node.kwargs.get("training", False)):
            continue
        if (node.args[1] if len(node.args) > 1 else node.kwargs.get("running_mean")) is None:
            raise ValueError(
                f"statistics='running' needs layers with running statistics, but {name_of(node)} has none; make it "
                "with track_running_stats=True, or choose another policy"
            )
        node.target = running_batch_norm
    if found:
        module.recompile()
    return module
