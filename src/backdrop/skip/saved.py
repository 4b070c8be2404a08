"""What a backward pass computes again from, and whether that is still what it was.

torch counts the changes of what it saves, so that one in place is an error in the backward pass. Changes through
`.data` are not counted. Where activations are computed again they would be those of another forward pass than the one
whose output was returned. So a sum over each leaf is kept beside it; another sum in the backward pass is an error. What
`.data` replaces, instead of writing over it, is kept as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

SMALL = 2**14  # numbers of a constant that is copied rather than watched
FEW = 2**12  # numbers of a tensor that has a sum together with others
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
    """Of their bits as whole numbers, which no order of adding changes; another sign or order is seen too.

    On a CPU small tensors of a kind are one sum, in which each number has a random factor of its own. Of larger ones
    there is a sum along the first axis, another along the others, and the largest number, because two signs cancel in a
    sum. On a GPU there is one norm of each, all in one call, which sees neither signs nor order.
    """
    given = [x.detach() for x in tensors if x.layout is torch.strided and not x.is_quantized]
    bits = [_bits(x) for x in given if x.device.type == "cpu"]
    found = [y for x in bits if x.numel() > FEW for y in _sums_of_many(x)]
    few = [x for x in bits if x.numel() <= FEW]
    for kind in {x.dtype for x in few}:
        row = torch.cat([x.reshape(-1) for x in few if x.dtype == kind])
        row = row.view(torch.int32) if row.dtype is torch.int64 else row  # lest a sign is a multiple of 2**63
        found.append((row.long() * _factors(1 << len(row).bit_length())[: len(row)]).sum())
    for device in {x.device for x in given if x.is_cuda and x.is_floating_point()}:
        norms = torch._foreach_norm([x for x in given if x.device == device and x.is_floating_point()])
        found.append(torch.stack([norm.double() for norm in norms]).view(torch.int64))
    return found


def _bits(x: Tensor) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x if x.dtype in INTEGERS.values() else x.view(INTEGERS[x.element_size()])


def _sums_of_many(x: Tensor) -> list[Tensor]:
    table = x if x.ndim > 1 else x[: len(x) // 64 * 64].reshape(-1, 64)
    sums = [table.sum(list(range(1, table.ndim)), dtype=x.dtype), table.sum(0, dtype=x.dtype), x.amax()]
    return sums if table is x else [*sums, x.sum(0, dtype=x.dtype)]


@functools.lru_cache(maxsize=8)
def _factors(number: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(2**31, (number,), generator=generator, device="cpu")
