"""Backdrop layers: the identity in the forward pass, a random mask on the gradient in the backward pass.

`Backdrop(p)` drops whole samples, for losses that need the whole batch (paper, section 3.1). `Backdrop1d`,
`Backdrop2d` and `Backdrop3d` drop positions of a feature map, for few but information-rich samples (section 3.2):
put one after the layer whose receptive field has the size of the structure to learn from.

>>> import torch
>>> from torch import nn
>>> from backdrop import Backdrop, Backdrop2d
>>> features = nn.Sequential(nn.Conv2d(1, 8, 16, stride=16), Backdrop2d(0.9))
>>> head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 4 * 4, 1), Backdrop(0.5))
>>> head(features(torch.randn(2, 1, 64, 64))).shape
torch.Size([2, 1])
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from backdrop import functional
from backdrop._core import marks
from backdrop._core.checks import (
    Choose,
    Dims,
    Patch,
    Probability,
    Scale,
    check_choose,
    check_differentiable,
    check_dims,
    check_generator,
    check_int,
    check_no_transforms,
    check_p,
    check_patch,
    check_scale,
)
from backdrop._core.draw import is_zero
from backdrop._core.product import wants_gradient
from backdrop._shared import Draw, Settings, SharedDraw
from backdrop.distributed import Group, check_group, not_compiled, resolve

__all__ = ["Backdrop", "Backdrop1d", "Backdrop2d", "Backdrop3d"]


class Backdrop(nn.Module):
    """Pass `x` through unchanged; in training, drop each unit's gradient with probability `p` (Eqs. 1 and 2).

    The default drops whole samples. In `eval()`, with `p=0` and where no gradient is wanted the output is the
    input itself and no random number is consumed.

    Args:
        p: probability that a unit's gradient is dropped, 0 <= p < 1. May be assigned between steps. As a 0-d
            tensor it is read on its device; assigning a number then fills that tensor, so that compiled code and
            captured CUDA graphs see the change.
        dims: axes along which units are drawn independently; all others share the draw. With axis 0 and others,
            every sample is a group of its own; otherwise there is one group.
        patch: positions per unit along the masked axes other than 0, one number or one per such axis.
        exact: keep exactly `max(1, round(N * (1 - p)))` of a group's N units.
        scale: "count" multiplies kept gradients by N/|b| (unbiased), "eq1" by (1-p) N/|b|, "probability" by
            1/(1-p), None by 1.
        choose: "uniform" chooses units blindly, "gradient" by the size of the gradient that arrives at them, weighted
            so that the result is as unbiased (`functional.choose_weight`).
        floor: with choose="gradient", the share of the choice that stays uniform.
        generator: source of randomness instead of the device's default generator.
        group: processes that draw one mask over all their samples: one count N/|b|, never empty as a whole. A process
            group, or "world". They agree on a seed in the first call; a generator has to be seeded alike on all. The
            mask is then a function of the seed and of `step`. With choose="gradient" it is chosen by the gradients of
            all of them, which have to go back through the same calls.
        uneven: batches may differ in size between the processes of the group; then their sizes are exchanged in every
            step.

    Shape: any, axis 0 being the batch; the output has the same shape, memory and strides.

    Examples:
        >>> layer = Backdrop(0.75, generator=torch.Generator().manual_seed(0))
        >>> x = torch.ones(8, 2, requires_grad=True)
        >>> layer(x).sum().backward()
        >>> x.grad[:, 0]
        tensor([0., 4., 0., 0., 0., 0., 0., 4.])
    """

    _defaults: ClassVar[dict[str, object]] = {
        "dims": 0,
        "patch": 1,
        "exact": False,
        "scale": "count",
        "choose": "uniform",
        "floor": 0.1,
    }
    _weighs_itself: ClassVar[bool] = False  # a subclass with a draw_weight of its own

    dims: Dims
    patch: Patch
    exact: bool
    scale: Scale
    choose: Choose = "uniform"
    floor: float = 0.1
    generator: torch.Generator | None

    def __init__(
        self,
        p: Probability = 0.5,
        dims: Dims = 0,
        *,
        patch: Patch = 1,
        exact: bool = False,
        scale: Scale = "count",
        choose: Choose = "uniform",
        floor: float = 0.1,
        generator: torch.Generator | None = None,
        group: Group = None,
        uneven: bool = False,
    ) -> None:
        super().__init__()
        check_dims(dims)
        check_patch(patch)
        check_scale(scale)
        check_choose(choose, floor)
        check_generator(generator)
        check_group(group)
        self._p = check_p(p)
        self.dims = dims
        self.patch = patch
        self.exact = exact
        self.scale = scale
        self.choose = choose
        self.floor = floor
        self.generator = generator
        self._across = None if group is None else SharedDraw(group, uneven)
        marks.register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        marks.register(self)

    @property
    def group(self) -> Group:
        """The processes that draw one mask, if there are several."""
        return None if self._across is None else self._across.group

    @group.setter
    def group(self, group: Group) -> None:
        check_group(group)
        self._across = None if group is None else SharedDraw(group, self._across is not None and self._across.uneven)

    @property
    def step(self) -> int:
        """With `group`: how many steps of the mask are done. Assign what it was, on all processes, to resume."""
        return 0 if self._across is None else self._across.step

    @step.setter
    def step(self, step: int) -> None:
        if self._across is None:
            raise ValueError("step is for masks over many processes, but this one has no group; make it with group=")
        self._across.step = check_int("step", step, 0)

    @property
    def p(self) -> Probability:
        """Probability that a unit's gradient is dropped; checked when it is assigned."""
        return self._p

    @p.setter
    def p(self, value: Probability) -> None:
        value = check_p(value)
        if isinstance(self._p, Tensor) and not isinstance(value, Tensor):
            self._p.fill_(value)
        else:
            self._p = value

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "draw_weight" in vars(cls) and cls.__module__ != __name__:
            cls._weighs_itself = True

    def forward(self, x: Tensor) -> Tensor:
        if marks.CAPTURING and torch.compiler.is_compiling():
            return marks.mark(x, self)
        if self._across is not None and (self.generator is not None or resolve(self._across.group) is not None):
            return self._forward_shared(x)
        if self._weighs_itself:
            check_differentiable(x)
            wanted = self.training and not is_zero(self._p) and wants_gradient(x)
            return functional.mask_gradient(x, self.draw_weight(x)) if wanted else x
        return functional.backdrop(
            x,
            self._p,
            self.dims,
            patch=self.patch,
            exact=self.exact,
            scale=self.scale,
            choose=self.choose,
            floor=self.floor,
            training=self.training,
            generator=self.generator,
        )

    @not_compiled
    def _forward_shared(self, x: Tensor) -> Tensor:
        if self.choose == "gradient":
            check_no_transforms()
        check_differentiable(x)
        check_dims(self.dims, x.ndim)
        wanted = self.training and wants_gradient(x)
        transforms = torch._C._are_functorch_transforms_active()
        mask = None if transforms else self.shared_draw(x, wanted)
        if mask is not None:
            return mask(x)
        return functional.mask_gradient(x, self.draw_weight(x)) if wanted and not is_zero(self._p) else x

    def shared_draw(self, x: Tensor, wanted: bool) -> Draw | None:
        """The mask of a call over many processes, to be drawn in backward; None where there is none of the kind."""
        if self._across is None or self._across.is_natural(x, self.generator) or not self.training:
            return None
        if not wanted:
            self._across.pass_by()
            return None
        return self._across.plan(x, self._settings(), self.generator)

    def _settings(self) -> Settings:
        return Settings(self._p, self.dims, self.patch, self.exact, self.scale, self.choose, self.floor)

    def draw_weight(self, x: Tensor) -> Tensor:
        """Draw what the gradient of `x` would be multiplied by; the same random numbers as a call uses."""
        if self.choose == "gradient" and not is_zero(self._p):
            raise RuntimeError("choose='gradient' chooses by the gradient that arrives: use choose_weight(grad)")
        if self._across is not None and (self.generator is not None or resolve(self._across.group) is not None):
            return self._draw_shared(x)
        return self._draw_natural(x)

    @not_compiled
    def _draw_shared(self, x: Tensor) -> Tensor:
        assert self._across is not None
        if self._across.is_natural(x, self.generator):
            return self._draw_natural(x)
        return self._across.plan(x, self._settings(), self.generator).weight

    def weight_is_used(self) -> None:
        """Say that a weight which was drawn in forward is used in backward, for the first time."""
        if self._across is not None:
            self._across.used()

    def _draw_natural(self, x: Tensor) -> Tensor:
        dtype = torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32
        return functional.draw_weight(
            tuple(x.shape),
            self._p,
            self.dims,
            patch=self.patch,
            exact=self.exact,
            scale=self.scale,
            generator=self.generator,
            device=x.device,
            dtype=dtype,
        )

    def chooser(self, x: Tensor) -> Draw | Backdrop:
        """What is to choose units in the backward pass of a call: this layer, or with `group` all processes."""
        return self.shared_draw(x, wanted=True) or self

    def choose_weight(self, grad: Tensor) -> Tensor:
        """Draw what this gradient is multiplied by where units are chosen by it."""
        shared = self.shared_draw(grad, wanted=True)
        if shared is not None:
            return shared.choose_weight(grad)
        return functional.choose_weight(
            grad,
            self._p,
            self.dims,
            patch=self.patch,
            exact=self.exact,
            scale=self.scale,
            floor=self.floor,
            generator=self.generator,
        )

    def choose_weight_and_count(self, *grads: Tensor) -> tuple[Tensor, float]:
        """The same over several tensors with the same units; and how many equal gradients theirs are worth.

        That is (sum |g_u|)^2 / sum |g_u|^2 over all units: reading it waits for the device.
        """
        return functional.choose_and_count(
            grads, self._p, self.dims, self.patch, self.exact, self.scale, self.floor, self.generator
        )

    def extra_repr(self) -> str:
        p = f"tensor({self._p.item():.7g})" if isinstance(self._p, Tensor) and not self._p.is_meta else self._p
        settings = {name: getattr(self, name) for name, default in self._defaults.items()}
        changed = [f"{name}={value!r}" for name, value in settings.items() if value != self._defaults[name]]
        generator = [] if self.generator is None else [f"generator=<{self.generator.device}>"]
        group = [] if self.group is None else [f"group={self.group if isinstance(self.group, str) else '...'}"]
        return ", ".join([f"p={p}", *changed, *generator, *group])


marks.implement(Backdrop.forward)


class _SpatialBackdrop(Backdrop):
    """Drops positions of a feature map (N, C, spatial axes); channels share the draw."""

    _defaults: ClassVar[dict[str, object]] = {
        "patch": 1,
        "shared": False,
        "exact": False,
        "scale": "count",
        "choose": "uniform",
        "floor": 0.1,
    }
    _spatial: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        p: Probability = 0.5,
        *,
        patch: Patch = 1,
        shared: bool = False,
        exact: bool = False,
        scale: Scale = "count",
        choose: Choose = "uniform",
        floor: float = 0.1,
        generator: torch.Generator | None = None,
        group: Group = None,
        uneven: bool = False,
    ) -> None:
        axes = tuple(range(2, 2 + len(self._spatial)))
        dims = axes if shared else (0, *axes)
        check_patch(patch, len(axes), dims)
        super().__init__(
            p,
            dims,
            patch=patch,
            exact=exact,
            scale=scale,
            choose=choose,
            floor=floor,
            generator=generator,
            group=group,
            uneven=uneven,
        )

    @property
    def shared(self) -> bool:
        """Whether all samples of a batch share one mask."""
        return isinstance(self.dims, tuple) and 0 not in self.dims

    def forward(self, x: Tensor) -> Tensor:
        self._check_rank(x)
        return super().forward(x)

    def draw_weight(self, x: Tensor) -> Tensor:
        self._check_rank(x)
        return super().draw_weight(x)

    def choose_weight(self, grad: Tensor) -> Tensor:
        self._check_rank(grad)
        return super().choose_weight(grad)

    def _check_rank(self, x: Tensor) -> None:
        check_differentiable(x)
        if x.ndim != 2 + len(self._spatial):
            expected = ", ".join(("N", "C", *self._spatial))
            raise ValueError(f"{type(self).__name__} expects input ({expected}), but got shape {tuple(x.shape)}")


class Backdrop1d(_SpatialBackdrop):
    """Drop the gradient of time steps, or patches of them, of a series with probability `p`.

    Every sample has its own mask, or with `shared=True` all have the same; channels always share it. Other
    arguments as for `Backdrop`.

    Shape: (N, C, L).
    """

    _spatial = ("L",)


class Backdrop2d(_SpatialBackdrop):
    """Drop the gradient of positions, or patches of them, of a feature map with probability `p`.

    Every sample has its own mask, or with `shared=True` all have the same; channels always share it. Other
    arguments as for `Backdrop`.

    Shape: (N, C, H, W).

    Examples:
        >>> layer = Backdrop2d(0.75, patch=2, exact=True, generator=torch.Generator().manual_seed(0))
        >>> x = torch.ones(1, 3, 4, 4, requires_grad=True)
        >>> layer(x).sum().backward()
        >>> x.grad[0, 0]  # one of four patches kept, in all channels
        tensor([[0., 0., 4., 4.],
                [0., 0., 4., 4.],
                [0., 0., 0., 0.],
                [0., 0., 0., 0.]])
    """

    _spatial = ("H", "W")


class Backdrop3d(_SpatialBackdrop):
    """Drop the gradient of voxels, or patches of them, of a volume with probability `p`.

    Every sample has its own mask, or with `shared=True` all have the same; channels always share it. Other
    arguments as for `Backdrop`.

    Shape: (N, C, D, H, W).
    """

    _spatial = ("D", "H", "W")


def drops_samples(layer: Backdrop, ndim: int | None = None) -> bool:
    """Whether whole samples are its units, on tensors of so many axes if that is known."""
    dims = (layer.dims,) if isinstance(layer.dims, int) else tuple(layer.dims)
    return dims == (0,) or (ndim is not None and dims == (-ndim,))
