"""One loss and one mask over many processes, with torch.distributed alone.

A loss that needs the whole batch needs it from all processes. The losses in `backdrop.losses` take `group=`: they
gather the scores, every process computes the same loss, and gradients averaged over processes, as
DistributedDataParallel and FSDP do it, are those of one process with all the data. Masks take `group=` too: one mask
over the samples of all processes, with one count N/|b|.

`group` is a process group or "world", which stands for all processes and is looked up when it is needed.

>>> import torch
>>> from backdrop.distributed import all_gather
>>> all_gather(torch.ones(2, 3)).shape  # one process: nothing to gather
torch.Size([2, 3])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Group", "all_gather"]

P = ParamSpec("P")
R = TypeVar("R")
Group: TypeAlias = "dist.ProcessGroup | Literal['world'] | None"


def all_gather(x: Tensor, group: Group = "world", *, same_loss: bool = False) -> Tensor:
    """Concatenate the rows of `x` over all processes, in the order of their ranks, with the right gradient.

    Batches may differ in size, and may be empty; everything but axis 0 has to agree. The gradient of `x` is the sum of
    what all processes send back, which takes one all-reduce in the backward pass.

    Args:
        x: tensor with at least one axis.
        group: the processes; without torch.distributed, or with one process, `x` itself is returned.
        same_loss: all processes compute the very same loss from the result. Then what they send back is the same, and
            nothing is communicated in the backward pass.
    """
    check_group(group)
    if not isinstance(x, Tensor):
        raise TypeError(f"x has to be a tensor, but got {type(x).__name__}")
    if x.ndim == 0:
        raise ValueError("x has to have an axis along which to concatenate, but got a 0-d tensor; use x[None]")
    processes = resolve(group)
    if processes is None:
        return x
    gathered: Tensor = _AllGather.apply(x, processes, same_loss)  # type: ignore[no-untyped-call]
    return gathered


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile leave a function alone, with a graph break; the compiler is not imported before it is used."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            disabled: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, slice]:
    """The rows of all processes, without a graph, and which of them are ours."""
    sizes = [size for (size,) in exchange([len(x)], group, x.device)]
    padded = x.detach().contiguous()
    if len(x) < max(sizes):
        padded = torch.cat([padded, padded.new_zeros(max(sizes) - len(x), *x.shape[1:])])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    first = sum(sizes[: group.rank()])
    rows = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return rows, slice(first, first + len(x))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, same_loss: bool) -> Tensor:
        rows, ctx.own = gather(x, group)
        ctx.group, ctx.same_loss = group, same_loss
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.same_loss:
            return grad[ctx.own] * ctx.group.size(), None, None
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.own], None, None


def sum_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of `x` over all processes, which compute the same loss from it; nothing is communicated in backward."""
    if group is None:
        return x
    total: Tensor = _SumOver.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.processes = group.size()
        total = x.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.processes, None


class SharedDraw:
    """What the processes of a group agree on so that each can draw the same mask for all samples by itself.

    In the first call they exchange seeds and batch sizes; after that nothing, unless batches are uneven.
    """

    def __init__(self, group: Group, uneven: bool) -> None:
        self.group, self.uneven = group, uneven
        self.agreed: tuple[dist.ProcessGroup, torch.Generator] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedDraw:
        return SharedDraw(self.group, self.uneven)

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "uneven": self.uneven, "agreed": None}

    @not_compiled
    def agree(
        self, rows: int, generator: torch.Generator | None, device: torch.device
    ) -> tuple[torch.Generator | None, int, int]:
        """The generator to draw with, the number of samples of all processes, and how many come before ours."""
        processes = resolve(self.group)
        if processes is None:
            return generator, rows, 0
        first_time = self.agreed is None or self.agreed[0] is not processes or self.agreed[1].device != device
        sizes = [rows] * processes.size()
        if first_time or self.uneven:
            own = int(torch.randint(2**62, ()).item()) if generator is None else generator.initial_seed() % 2**63
            seeds, sizes = map(list, zip(*exchange([own, rows], processes, device), strict=True))
            if generator is not None and len(set(seeds)) > 1:
                raise ValueError(
                    "generator has to be seeded alike on all processes of the group, so that they draw one mask, but "
                    f"got the seeds {', '.join(map(str, seeds))}"
                )
            if not self.uneven and len(set(sizes)) > 1:
                raise ValueError(
                    f"the batches of the processes have the sizes {', '.join(map(str, sizes))}; with uneven=True they "
                    "are exchanged in every step"
                )
            if first_time:
                self.agreed = processes, torch.Generator(device).manual_seed(seeds[0])
        assert self.agreed is not None
        shared = self.agreed[1] if generator is None else generator
        return shared, sum(sizes), sum(sizes[: processes.rank()])


def resolve(group: Group) -> dist.ProcessGroup | None:
    """The process group, or None where there is one process only."""
    if group is None or not dist.is_available() or not dist.is_initialized():
        return None
    processes = dist.group.WORLD if isinstance(group, str) else group
    return processes if processes is not None and processes.size() > 1 else None


def check_group(group: Group) -> None:
    if group is None or group == "world" or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    given = repr(group) if isinstance(group, str) else type(group).__name__
    raise TypeError(f"group has to be a torch.distributed.ProcessGroup, 'world' or None, but got {given}")


def exchange(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """What each process gave, in the order of ranks. On the CPU where the group can, so that no GPU is waited for."""
    kinds = {kind.type for kind in group._device_types}
    own = torch.tensor(numbers, device="cpu" if "cpu" in kinds else device)
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return [part.tolist() for part in parts]
