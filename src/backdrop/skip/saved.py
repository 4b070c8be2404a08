"""What a backward pass computes again from, and whether that is still what it was.

torch counts the changes of what it saves, so that one in place is an error in the backward pass. Changes through
`.data` are not counted. Where activations are computed again they would be those of another forward pass than the one
whose output was returned. So a sum over each leaf is kept beside it; another sum in the backward pass is an error. What
`.data` replaces, instead of writing over it, is kept as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

SMALL = 2**14  # numbers of a constant that is copied rather than watched
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHANGED = (
    "weights or inputs of what is skipped were changed between the forward and the backward pass, in place and through "
    "`.data`, so that it cannot be computed again. Change them before forward() or after backward()"
)


def save(ctx: Any, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> None:
    """Keep those of the tensors that are wanted, for `load`."""
    _late.raise_if_changed()
    # What was made in inference mode cannot be saved by torch. Small constants, buffers above all, and biases may
    # change before the backward pass, which is an error only for what torch itself would have saved.
    ctx.apart = {i: x if x.is_inference() else x.clone() for i, x in enumerate(tensors) if wanted[i] and _is_apart(x)}
    keeps = [keep and i not in ctx.apart for i, keep in enumerate(wanted)]
    ctx.watched = [i for i, x in enumerate(tensors) if keeps[i] and x.is_leaf and type(x) in (Tensor, nn.Parameter)]
    saved = [x.detach() if keep else None for x, keep in zip(tensors, keeps, strict=True)]
    ctx.sums = _sums([tensors[i] for i in ctx.watched])
    ctx.save_for_backward(*saved)


def load(ctx: Any) -> list[Tensor]:
    """What was saved, or an error if it was changed; on a GPU one of the next passes finds that."""
    tensors = [ctx.apart.get(i, x) for i, x in enumerate(ctx.saved_tensors)]
    _late.raise_if_changed()
    for before, now in zip(ctx.sums, _sums([tensors[i] for i in ctx.watched]), strict=True):
        if before.is_cuda:
            _late.compare(before, now)
        elif not torch.equal(before, now):
            raise RuntimeError(CHANGED)
    return tensors


class _Late:
    """Comparisons on a GPU, for which nobody waits."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.cuda.Event, Tensor]] = []

    def compare(self, before: Tensor, now: Tensor) -> None:
        changed = torch.empty((), dtype=torch.bool, pin_memory=True)
        changed.copy_((before != now).any(), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self.pending.append((event, changed))

    def raise_if_changed(self) -> None:
        while self.pending and self.pending[0][0].query():  # type: ignore[no-untyped-call]
            if self.pending.pop(0)[1]:
                self.pending.clear()
                raise RuntimeError(f"{CHANGED}. This was found out after an earlier backward pass")


_late = _Late()


def _is_apart(x: Tensor) -> bool:
    return x.is_inference() or (x.numel() <= SMALL and (x.ndim <= 1 or not x.requires_grad))


def _sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of their bits as whole numbers, along the first axis and along the others: another sign or order is seen too.

    On a GPU one norm of each, all in one call.
    """
    given = [x.detach() for x in tensors if x.layout is torch.strided and not x.is_quantized]
    found = [y for x in given if x.device.type == "cpu" for y in _sums_of_bits(x)]
    for device in {x.device for x in given if x.is_cuda and x.is_floating_point()}:
        norms = torch._foreach_norm([x for x in given if x.device == device and x.is_floating_point()])
        found.append(torch.stack([norm.double() for norm in norms]).view(torch.int64))
    return found


def _sums_of_bits(x: Tensor) -> list[Tensor]:
    x = torch.view_as_real(x) if x.is_complex() else x
    x = x if x.dtype in INTEGERS.values() else x.view(INTEGERS[x.element_size()])
    if x.ndim < 2:
        return [x.sum(0, dtype=x.dtype) if x.ndim else x.clone()]
    return [x.sum(list(range(1, x.ndim)), dtype=x.dtype), x.sum(0, dtype=x.dtype)]
