"""One mask over many processes: each draws all of it by itself, and they notice when they would draw different ones.

The rules, which other files cite by number:

1. A mask is a function of a seed, a step, its number within the step, and its settings (p, units, exact, scale).
   Nothing depends on what was drawn before, so processes that did different things for a while find together again.
2. A step is a backward pass that uses the mask for the first time. A call in training mode for which no gradient is
   wanted is a step as well: the other processes may have gone back from theirs. Calls in eval() and forward passes
   that nobody goes back from are none.
3. A layer draws in the backward pass. The engine has to know its mask before, and draws in forward; there too the step
   ends with the backward pass.
4. Several masks of one step are numbered in the order in which they are drawn. A forward pass that a checkpoint runs
   again has the numbers of the first time.
5. What was drawn is added up to a checksum. After every CHECK_EVERY steps the processes leave theirs in the key-value
   store of the group and compare what all left there the time before, which has arrived by then: nobody waits, and no
   collective is spent on it. Where sizes are exchanged anyway, in every call, the checksum goes along.
6. Where they disagree all of them raise an error, and agree anew in the next call.
7. Masks that choose by gradients gather the sizes of those of all units, in the backward pass, if units of different
   processes are in one group. From there on every process makes the choice for all of them.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from backdrop import functional
from backdrop._core import informed
from backdrop._core.checks import Choose, Dims, Patch, Probability, Scale, check_dims, check_not_batched, is_readable
from backdrop._core.draw import checkpoint_rerun, generator_for, is_zero, make_lattice, spread
from backdrop._core.product import multiply, names_backdrop
from backdrop.distributed import Group, exchange, gather_parts, resolve

CHECK_EVERY = 8  # steps
ADVICE = (
    "they have to call it equally often in training mode, with the same p and settings and with batches of one size "
    "(or uneven=True); what one process does alone belongs in eval(). They agree anew in the next call"
)


class Settings(NamedTuple):
    """What a mask is made of besides random numbers."""

    p: Probability
    dims: Dims
    patch: Patch
    exact: bool
    scale: Scale
    choose: Choose = "uniform"
    floor: float = 0.1


class Agreed(NamedTuple):
    """What the processes found out from each other in the first call."""

    processes: dist.ProcessGroup | None
    generator: torch.Generator | None
    seed: int
    ledger: Ledger | None
    number: int  # of this mask in the ledger


class SharedDraw:
    """The masks of a layer over a group of processes, which may be one."""

    def __init__(self, group: Group, uneven: bool, step: int = 0) -> None:
        self.group, self.uneven = group, uneven
        self.agreed: Agreed | None = None
        self.joining = False  # see backdrop.distributed.Joined
        self.calls = 0  # that exchanged sizes while joining
        self._step, self._number = step, 0  # of the next mask
        self._pass: int | None = None  # the backward pass that ends this step
        self._again = (-1, 0)  # the backward pass in which a checkpoint runs forward again, and masks since
        self._draws, self._since, self._window = 0, (0, 0), -1  # draws in all; steps and draws at the last check
        self._sizes: list[int] = []
        self._salted: tuple[torch.Generator, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedDraw:
        return SharedDraw(self.group, self.uneven, self.step)

    def __getstate__(self) -> dict[str, Any]:
        return {"group": self.group, "uneven": self.uneven, "step": self.step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["group"], state["uneven"], state.get("step", 0))  # type: ignore[misc]

    @property
    def step(self) -> int:
        """How many are done."""
        return self._step + (self._pass is not None and torch._C._current_graph_task_id() != self._pass)

    @step.setter
    def step(self, value: int) -> None:
        self._step, self._number, self._pass = value, 0, None

    def forget(self) -> None:
        """Agree anew in the next call."""
        self.agreed = None

    def is_natural(self, x: Tensor, generator: torch.Generator | None) -> bool:
        """Whether the generator itself draws: one process without one, or while a CUDA graph of one is recorded."""
        if resolve(self.group) is not None:
            return False
        return generator is None or (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def plan(self, x: Tensor, settings: Settings, generator: torch.Generator | None) -> Draw:
        """The mask of a call, not drawn yet."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a mask over many processes cannot be recorded in a CUDA graph: leave it out of the graph"
            )
        over_samples = 0 in check_dims(settings.dims, x.ndim)
        make_lattice(x.shape, settings.dims, settings.patch)
        if isinstance(settings.p, Tensor):
            settings = settings._replace(p=settings.p.detach().clone())
        again = _is_rerun()
        rows = x.shape[0] if over_samples else 0
        total, first = self._agree(rows, x, settings, generator, again)
        if not again:
            self._check()
        shape = (total, *x.shape[1:]) if over_samples else tuple(x.shape)
        return Draw(self, settings, shape, slice(first, first + rows) if over_samples else None, x, self._sizes)

    def pass_by(self) -> None:
        """A call in training mode without a mask is a step, too."""
        if not _is_rerun():
            self._close()
            self._step, self._number = self._step + 1, 0

    def absent(self) -> None:
        """A step that the others take without this process, which has no more batches."""
        self.pass_by()
        if self.agreed is not None and self.agreed.ledger is not None:
            if self.uneven:
                self._over_store(self.agreed.ledger, None)
            self.agreed.ledger.absent = True
            self._check()

    def used(self) -> None:
        """A mask that was drawn in forward is used in backward for the first time."""
        task = torch._C._current_graph_task_id()
        self._close()
        self._pass = None if task == -1 else task

    def draw(self, mask: Draw) -> Tensor:
        """The weights of a mask."""
        weight = functional.draw_weight(
            mask.shape,
            mask.settings.p,
            mask.settings.dims,
            patch=mask.settings.patch,
            exact=mask.settings.exact,
            scale=mask.settings.scale,
            generator=self._generator(mask),
            device=mask.device,
            dtype=mask.dtype,
        )
        return weight if mask.rows is None else weight[mask.rows]

    def choose(self, mask: Draw, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The weights of a mask that chooses by these gradients, as for the first of them; and the units' sizes."""
        settings, generator = mask.settings, self._generator(mask)
        lattices = [make_lattice(grad.shape, settings.dims, settings.patch) for grad in grads]
        norms, own = informed.unit_norms(*zip(grads, lattices, strict=True)), slice(None)
        part = None
        if mask.rows is not None and len(lattices[0].axes) > 1:  # every sample is a group of its own
            part = mask.shape[0], mask.rows
        elif not is_zero(settings.p):
            norms, own = self._norms_of_all(norms, mask)
        weight = informed.weigh_norms(
            norms, settings.p, settings.exact, settings.scale, settings.floor, generator, part
        )[:, own]
        return spread(weight.to(mask.dtype), lattices[0], grads[0].shape), norms

    def _norms_of_all(self, norms: Tensor, mask: Draw) -> tuple[Tensor, slice]:
        """Sizes of the gradients of the units of all processes, and which of these are ours."""
        assert self.agreed is not None
        if self.agreed.processes is None:
            return norms, slice(None)
        if mask.rows is None:  # the same units on all of them
            found = gather_parts(norms, [1] * self.agreed.processes.size(), self.agreed.processes)
            return informed.together(found), slice(None)
        found = gather_parts(norms.T, mask.sizes, self.agreed.processes)
        return torch.cat(found).T, mask.rows

    def _generator(self, mask: Draw) -> torch.Generator:
        """For the next mask, whose draw is noted."""
        step, number = self._next()
        assert self.agreed is not None
        if self.agreed.ledger is not None and not _is_rerun():
            self.agreed.ledger.note(self.agreed.number, step, number, _spell(mask.settings, mask.shape))
        place = torch.device("cpu") if mask.device.type == "meta" else mask.device
        return generator_for(place, self.agreed.seed, step, number)

    def _next(self) -> tuple[int, int]:
        task = torch._C._current_graph_task_id()
        if _is_rerun():
            number = self._again[1] if self._again[0] == task else 0
            self._again = task, number + 1
            return self._step, number
        self._close()
        if task != -1:
            self._pass = task
        self._number += 1
        self._draws += 1
        return self._step, self._number - 1

    def _close(self) -> None:
        """End the step if the backward pass that used its mask is over."""
        if self._pass is not None and torch._C._current_graph_task_id() != self._pass:
            self._step, self._number, self._pass = self._step + 1, 0, None

    def _agree(
        self, rows: int, x: Tensor, settings: Settings, generator: torch.Generator | None, again: bool
    ) -> tuple[int, int]:
        """How many samples all processes have, and how many come before ours."""
        processes, known = resolve(self.group), self.agreed
        is_known = known is not None and known.processes is processes and known.generator is generator
        if processes is None:
            if not is_known:
                assert generator is not None
                seed = _digest(f"{generator.initial_seed()} {self._salt(generator)}")
                self.agreed = Agreed(None, generator, seed, None, 0)
            return rows, 0
        if again and is_known:
            sizes = self._sizes
        elif not is_known or (known is not None and known.ledger is not None and known.ledger.broken):
            sizes = self._first(rows, x.device, processes, generator)
        elif self.uneven:
            assert known is not None
            assert known.ledger is not None
            self._close()
            own = [rows, self._step, _digest(_spell(settings, (1, *x.shape[1:]))) % 2**48]
            found = self._over_store(known.ledger, own) if self.joining else exchange(own, processes, x.device)
            sizes = [size for size, _, _ in found]
            there = [(step, check) for _, step, check in found if step >= 0]
            if len(set(there)) > 1:
                self._step, self._number = max(step for step, _ in there), 0
                known.ledger.broken = True
                raise RuntimeError(
                    "the processes of a group are about to draw different masks: they are at the steps "
                    f"{', '.join(str(step) for step, _ in there)}"
                    + (", with other settings or shapes" if len({check for _, check in there}) > 1 else "")
                    + f"; here the step {self._step} with {_spell(settings, (1, *x.shape[1:]))}; {ADVICE}"
                )
        else:
            sizes = [rows] * processes.size()
        self._sizes = sizes
        return sum(sizes), sum(sizes[: processes.rank()])

    def _first(
        self, rows: int, device: torch.device, processes: dist.ProcessGroup, generator: torch.Generator | None
    ) -> list[int]:
        own = int(torch.randint(2**62, ()).item()) if generator is None else generator.initial_seed() % 2**63
        salt = 0 if generator is None else self._salt(generator)
        ledger = _ledgers.get(processes.group_name)
        name = 0 if ledger is None or ledger.broken or ledger.processes is not processes else ledger.name
        given = [self.uneven, generator is not None]
        numbers = [own, salt, rows, self.step, name, secrets.randbits(62), *map(int, given)]
        seeds, salts, sizes, steps, names, fresh, *there = map(
            list, zip(*exchange(numbers, processes, device), strict=True)
        )
        for what, values in zip(("uneven", "a generator"), there, strict=True):
            if len(set(values)) > 1:
                ranks = ", ".join(str(rank) for rank, value in enumerate(values) if value)
                raise ValueError(
                    f"{what} has to be given on all processes of the group or on none, but got it on {ranks} alone"
                )
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
        if ledger is None or not name or len(set(names)) > 1:
            ledger = _ledgers[processes.group_name] = Ledger(fresh[0], processes)
        self.step = max(steps)
        self._window = -1
        self.agreed = Agreed(processes, generator, _digest(f"{seeds[0]} {salts[0]}"), ledger, ledger.join())
        return sizes

    def _salt(self, generator: torch.Generator) -> int:
        """Tells the masks of one generator apart."""
        if self._salted is None or self._salted[0] is not generator:
            self._salted = generator, _layers.get(generator, 0)
            _layers[generator] = self._salted[1] + 1
        return self._salted[1]

    def _check(self) -> None:
        ledger = None if self.agreed is None else self.agreed.ledger
        if ledger is None:
            return
        now = self.step, self._draws
        if self._window != ledger.window:
            self._window, self._since = ledger.window, now
            return
        steps, draws = now[0] - self._since[0], now[1] - self._since[1]
        # Steps that do not go on are those of weights that somebody draws by hand.
        if steps >= CHECK_EVERY or (not steps and draws >= 4 * CHECK_EVERY):
            self._window, self._since = self._window + 1, now
            ledger.check()

    def _over_store(self, ledger: Ledger, own: list[int] | None) -> list[list[int]]:
        """What `exchange` does, without a collective: processes that have joined have none in this order."""
        assert self.agreed is not None
        self.calls += 1
        key = f"sizes/{self.agreed.number}/{self.calls % 2}/"  # nobody is two calls ahead of another
        ledger.leave(key, [self.calls, *(own or (0, -1, 0))])
        return [] if own is None else [found[1:] for found in ledger.collect(key, self.calls)]


class Draw:
    """The mask of one call: drawn when it is first asked for, and then kept."""

    def __init__(
        self,
        shared: SharedDraw,
        settings: Settings,
        shape: Sequence[int],
        rows: slice | None,
        x: Tensor,
        sizes: Sequence[int],
    ) -> None:
        self.shared, self.settings, self.shape, self.rows, self.device = shared, settings, tuple(shape), rows, x.device
        self.sizes = tuple(sizes)  # how many samples each process has
        self.dtype = torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32
        self._weight: Tensor | None = None
        self._norms: Tensor | None = None  # of all units, where gradients chose

    @property
    def weight(self) -> Tensor:
        if self._weight is None:
            with torch.no_grad():
                self._weight = self.shared.draw(self)
        return self._weight

    def choose_weight(self, *grads: Tensor) -> Tensor:
        """The weights chosen by the first gradients that arrive, and then kept."""
        if self._weight is None:
            for grad in grads:
                check_not_batched(grad)
            with torch.no_grad():
                self._weight, self._norms = self.shared.choose(self, grads)
        return self._weight

    def choose_weight_and_count(self, *grads: Tensor) -> tuple[Tensor, float]:
        """As that of a layer, over all processes."""
        weight = self.choose_weight(*grads)
        assert self._norms is not None
        return weight, informed.effective_number(self._norms)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` unchanged, in the same memory; in the backward pass its gradient is masked."""
        masked: Tensor = _MaskLater.apply(x, self)  # type: ignore[no-untyped-call]
        return masked


@names_backdrop
class _MaskLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Draw) -> Tensor:
        ctx.mask = mask
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        chooses = ctx.mask.settings.choose == "gradient"
        weight = ctx.mask.choose_weight(grad) if chooses else ctx.mask.weight
        if is_zero(ctx.mask.settings.p):
            return grad, None
        weight = weight if weight.ndim == grad.ndim else weight.view(-1, *[1] * (grad.ndim - 1))
        return multiply(grad, weight), None


class Ledger:
    """What the masks of a group have drawn, compared between the processes from time to time (rule 5)."""

    def __init__(self, name: int, processes: dist.ProcessGroup) -> None:
        self.name, self.processes = name, processes
        self.rank, self.size = processes.rank(), processes.size()
        self.store = dist.distributed_c10d._get_process_group_store(processes)
        self.window, self.masks, self.broken, self.absent = 0, 0, False, False
        self.sum, self.notes = 0, Counter[str]()
        self.own: list[int] = []  # of the last two windows

    def join(self) -> int:
        """The number of a new mask."""
        self.masks += 1
        return self.masks

    def note(self, mask: int, step: int, number: int, text: str) -> None:
        self.sum = (self.sum + _digest(f"{mask} {step} {number} {text}")) % 2**48
        self.notes[f"mask {mask} with {text}"] += 1

    def check(self) -> None:
        """Leave what was drawn since the last time, and compare what all left then."""
        window, self.window = self.window, self.window + 1
        self.own = [*self.own[-1:], self.sum]
        self.store.set(f"{self._key(window)}{self.rank}", json.dumps(self.notes))
        for name, value in (("sum", self.sum), ("absent", int(self.absent)), ("count", 1)):
            self.store.add(self._key(window) + name, value)
        self.sum, self.notes, self.absent = 0, Counter(), False
        if window >= 4:  # all have come to window - 1, so they are done with window - 4
            self.store.delete_key(f"{self._key(window - 4)}{self.rank}")
            if self.rank == 0:
                for name in ("sum", "absent", "count"):
                    self.store.delete_key(self._key(window - 4) + name)
        if window:
            self._compare(self._key(window - 1), self.own[0])

    def leave(self, key: str, numbers: list[int]) -> None:
        self.store.set(f"backdrop/{self.name}/{key}{self.rank}", json.dumps(numbers))

    def collect(self, key: str, least: int) -> list[list[int]]:
        """What all left there, once the first number of each is so large."""
        keys = [f"backdrop/{self.name}/{key}{rank}" for rank in range(self.size)]
        found: list[list[int]] = [[0]] * self.size

        def missing() -> list[int]:
            for rank in range(self.size):
                if found[rank][0] < least and self.store.check([keys[rank]]):
                    found[rank] = json.loads(self.store.get(keys[rank]))
            return [rank for rank in range(self.size) if found[rank][0] < least]

        self._wait(missing)
        return found

    def _key(self, window: int) -> str:
        return f"backdrop/{self.name}/{window}/"

    def _compare(self, key: str, own: int) -> None:
        def missing() -> list[int]:
            if self.store.add(key + "count", 0) == self.size:
                return []
            return [rank for rank in range(self.size) if not self.store.check([f"{key}{rank}"])] or [self.rank]

        self._wait(missing)
        if self.store.add(key + "absent", 0) or self.store.add(key + "sum", 0) == own * self.size:
            return
        self.broken = True
        _ledgers.pop(self.processes.group_name, None)
        drew = [json.loads(self.store.get(f"{key}{rank}")) for rank in range(self.size)]
        others = [rank for rank in range(1, self.size) if drew[rank] != drew[0]] or [self.size - 1]
        told = [f"process {rank} drew {_count(drew[rank])}" for rank in (0, *others[:3])]
        raise RuntimeError(
            f"the processes of a group have drawn different masks within the last {2 * CHECK_EVERY} steps: "
            f"{'; '.join(told)}; {ADVICE}"
        )

    def _wait(self, missing: Any) -> None:
        """Until none is missing; hardly ever for long, because processes that train together are never far apart."""
        limit: float = self.store.timeout.total_seconds()  # type: ignore[attr-defined]
        end, pause = time.monotonic() + limit, 0.0005
        while left := missing():
            if time.monotonic() > end:
                self.broken = True
                others = f"process{'es' * (len(left) > 1)} {', '.join(map(str, left))}"
                raise RuntimeError(
                    f"waited {limit:.0f} s for the {others} of a group that draws one mask: ended, or at another step "
                    f"than this process, {self.rank}; {ADVICE}. Where batches run out on some processes, use "
                    "backdrop.distributed.Joined"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


_ledgers: WeakValueDictionary[str, Ledger] = WeakValueDictionary()
_layers: WeakKeyDictionary[torch.Generator, int] = WeakKeyDictionary()  # how many masks a generator has


def _is_rerun() -> bool:
    return checkpoint_rerun() == "non-reentrant"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 2**63


def _spell(settings: Settings, shape: Sequence[int]) -> str:
    lattice = make_lattice(shape, settings.dims, settings.patch)
    p = settings.p
    if isinstance(p, Tensor):
        p = float(p) if is_readable(p) else -1.0  # whose value would have to be waited for
    sizes = f"{lattice.groups} x {lattice.size}" if lattice.groups > 1 else str(lattice.size)
    patch = f", patch={max(lattice.patch)}" if max(lattice.patch) > 1 else ""
    chosen = f", chosen by gradient with floor={settings.floor:g}" if settings.choose == "gradient" else ""
    return f"p={p:.9g}, {sizes} units{patch}, exact={settings.exact}, scale={settings.scale}{chosen}"


def _count(drew: dict[str, int]) -> str:
    return " and ".join(f"{what} {times} times" for what, times in list(drew.items())[:4]) or "nothing"
