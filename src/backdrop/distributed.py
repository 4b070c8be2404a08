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
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.algorithms.join import Joinable, JoinHook

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from backdrop._shared import SharedDraw

__all__ = ["Group", "Joined", "agree", "all_gather"]

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
    first = sum(sizes[: group.rank()])
    return torch.cat(gather_parts(x, sizes, group)), slice(first, first + len(x))


def gather_parts(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """What each process has, without a graph; the numbers of their rows are known."""
    padded = x.detach().contiguous()
    if len(x) < max(sizes):
        padded = torch.cat([padded, padded.new_zeros(max(sizes) - len(x), *x.shape[1:])])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


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


def agree(model: nn.Module) -> None:
    """Let the masks of `model` over many processes agree anew, in their next call: on the seed, the sizes and the step.

    The step is then the largest of all processes. For whoever knows that they went apart, such as an epoch with more
    batches on some; all processes have to call this at the same place.
    """
    for mask in _shared_draws(model):
        mask.forget()


class Joined(Joinable):
    """DistributedDataParallel for torch's `Join`, with masks over all processes in it: `Join([Joined(model)])`.

    Where some processes have fewer batches, `Join` has them take part in the communication of the others until all are
    done. This does so for masks: their steps go on, and with `uneven=True` they count with no samples. While it is open
    sizes are exchanged through the key-value store of the group.

    Args:
        model: the DistributedDataParallel whose module holds the masks.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        if not isinstance(model, Joinable):
            raise TypeError(f"model has to be a DistributedDataParallel, but got {type(model).__name__}")
        self.model = model
        super().__init__()

    @property
    def _join_config(self) -> Any:
        return self.model._join_config  # which the model looks at

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self.model._join_config = config

    def join_hook(self, **kwargs: Any) -> JoinHook:
        for name, module in self.model.named_modules():
            if getattr(module, "choose", "") == "gradient" and _shared_draws(module):
                raise RuntimeError(
                    f"the mask {name} chooses by the gradients of all processes, which those without batches do not "
                    "have; use choose='uniform' with Joined, or as many batches on all processes"
                )
        return _JoinedHook(_shared_draws(self.model), self.model.join_hook(**kwargs))  # type: ignore[no-untyped-call]

    @property
    def join_device(self) -> torch.device:
        return self.model.join_device  # type: ignore[no-any-return]

    @property
    def join_process_group(self) -> Any:
        return self.model.join_process_group


class _JoinedHook(JoinHook):
    def __init__(self, masks: list[SharedDraw], inner: JoinHook) -> None:
        self.masks, self.inner = masks, inner
        for mask in masks:
            mask.joining = True

    def main_hook(self) -> None:
        for mask in self.masks:  # first, because what follows waits for the others
            mask.absent()
        self.inner.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        for mask in self.masks:
            mask.joining = False
        self.inner.post_hook(is_last_joiner)


def _shared_draws(model: nn.Module) -> list[SharedDraw]:
    found = [getattr(module, "_across", None) for module in model.modules()]
    return [mask for mask in found if mask is not None and resolve(mask.group) is not None]


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
    given += ", as torch gives it for a group that this process is not in" if isinstance(group, int) else ""
    raise TypeError(f"group has to be a torch.distributed.ProcessGroup, 'world' or None, but got {given}")


def exchange(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """What each process gave, in the order of ranks. On the CPU where the group can, so that no GPU is waited for."""
    kinds = {kind.type for kind in group._device_types}
    own = torch.tensor(numbers, device="cpu" if "cpu" in kinds else device)
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return [part.tolist() for part in parts]
