"""Losses at random, for `fuzz.py`: every one of them, with what is promised of all and of each."""

import math
from dataclasses import dataclass, field

import torch

from backdrop import losses
from fuzz_values import a_shape, a_tensor, check, mostly

NUMBERS = [1, 0.5, 1e-30, 1e30, 3.0]
TAME = (1, 0.5, 3.0)


@dataclass(frozen=True)
class Kind:
    """A loss.

    Args:
        second: what goes with the inputs: "labels", "relevance", "same" (one more of their kind) or "events".
        numbers: settings that have to be given.
        usual: settings that may be given.
        words: values of other settings.
        low: the least that the loss can be without weights.
        high: the most.
        columns: the inputs may have several.
    """

    second: str = "labels"
    numbers: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    low: float = 0.0
    high: float = 1.0
    columns: bool = True


KINDS = {
    "rank_statistic_loss": Kind(usual=("temperature",)),
    "squared_hinge_auc_loss": Kind(usual=("margin",), high=math.inf),
    "partial_auc_loss": Kind(numbers=("max_fpr", "temperature")),
    "class_distance_loss": Kind(numbers=("distance",), high=math.inf),
    "soft_f_beta_loss": Kind(usual=("beta",)),
    "average_precision_loss": Kind(numbers=("temperature",)),
    "ndcg_loss": Kind("relevance", ("temperature",), words={"gains": ("exponential", "linear")}),
    "spearman_loss": Kind("same", ("temperature",), high=2.0),
    "cox_loss": Kind("events", words={"ties": ("efron", "breslow")}, high=math.inf, columns=False),
    "concordance_loss": Kind("events", ("temperature",), columns=False),
    "contrastive_loss": Kind("same", ("temperature",), words={"form": ("softmax", "sigmoid")}, high=math.inf),
    "soft_rank": Kind("", ("temperature",), low=0.5, high=math.inf),
}


def a_loss(r):
    name, sane = r.choice(list(KINDS)), r.random() < 0.6
    usually = (lambda good: good()) if sane else (lambda good: mostly(r, good))
    kind, n = KINDS[name], r.choice([2, 3, 5, 17] if sane else [0, 1, 2, 3, 5, 17])
    columns = r.choice([0, 0, 1, 2, 3]) if kind.columns else r.choice([0, 0, 0, 1])
    columns = columns or name == "contrastive_loss"
    shape = (n, columns) if columns else (n,)
    x = usually(lambda: a_tensor(r, shape if sane or r.random() < 0.9 else a_shape(r), sane or r.random() < 0.95))
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        x = (x.sigmoid() if name == "soft_f_beta_loss" else x).detach().requires_grad_()
    others = [usually(other) for other in (fitting if sane else seconds)(r, kind, x, n, columns)]
    more = {k: usually(lambda: r.choice(TAME if sane else NUMBERS)) for k in kind.numbers}
    more |= {k: usually(lambda: r.choice(NUMBERS)) for k in kind.usual if r.random() < 0.5}
    more |= {k: usually(lambda v=v: r.choice(v)) for k, v in kind.words.items() if r.random() < 0.6}
    if "max_fpr" in more and sane:
        more["max_fpr"] = r.choice([1, 0.5, 1e-3])
    weights = [
        lambda: torch.rand(n),
        lambda: torch.randint(0, 3, (n,)),
        lambda: -torch.rand(n),
        lambda: torch.rand(n, 2),
    ]
    if r.random() < 0.4:
        more["weight"] = usually(r.choice(weights[:2] if sane else weights))
    if r.random() < 0.5 and name != "soft_rank":
        more["single_class"] = usually(lambda: r.choice(["zero", "error"]))
    if name == "cox_loss" and r.random() < 0.3:
        more["strata"] = usually(lambda: torch.randint(-1, 2, (n,)))
    if name == "cox_loss" and r.random() < 0.3:
        more["entry"] = usually(lambda: r.choice([torch.zeros(n), torch.full((n,), -math.inf), torch.rand(n)]))
    if name == "contrastive_loss" and r.random() < 0.4:
        more["labels"] = usually(lambda: torch.randint(0, 3, (n,)))
    if name == "contrastive_loss" and more.get("form") == "sigmoid" and r.random() < 0.6:
        more["bias"] = usually(lambda: r.choice([0, -10.0, torch.tensor(0.5)]))
    value = getattr(losses, name)(x, *others, **more)
    check(value.shape == (x.shape if name == "soft_rank" else ()), "a value of another shape")
    tame = all(v in TAME for k, v in more.items() if k in (*kind.numbers, *kind.usual) and k != "max_fpr")
    tame = tame and all(map(is_tame, (x, *others, *(v for v in more.values() if isinstance(v, torch.Tensor)))))
    if value.requires_grad:
        (g,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
        check(g.shape == x.shape and g.dtype == x.dtype, "gradient of another shape or type")
        check(not tame or bool(value.isfinite().all() and g.isfinite().all()), f"not finite: {value}, {g}")
    if tame:
        of_the_same(name, kind, value, x, others, more)


def fitting(r, kind, x, n, columns):
    """What goes with the inputs, as functions that make it."""
    if kind.second == "same":
        return [lambda: torch.randn(x.shape).to(x.dtype)]
    if kind.second == "relevance":
        return [lambda: torch.randint(0, 5, x.shape)]
    if kind.second == "events":
        times = r.choice([torch.rand(n), torch.randint(1, 5, (n,))])
        return [lambda: times, lambda: torch.randint(0, 2, (n,))]
    of_several = r.choice([torch.randint(0, max(columns, 2), (n,)), torch.rand(n, max(columns, 1)) < 0.5])
    return [lambda: of_several if columns > 1 and kind.high <= 1 else torch.randint(0, 2, (n,))] if kind.second else []


def seconds(r, kind, x, n, columns):
    """The same, which may not fit."""
    if not kind.second:
        return []
    if kind.second == "same":
        like = x.shape if isinstance(x, torch.Tensor) else (n,)
        kinds = [lambda: torch.randn(like), lambda: torch.randn(like).double(), lambda: torch.zeros(like)]
        return [r.choice(kinds)]
    if kind.second == "relevance":
        return [lambda: torch.randint(-1, 5, (n, columns) if columns else (n,))]
    if kind.second == "events":
        times = [lambda: torch.rand(n), lambda: torch.randn(n), lambda: torch.full((n,), math.inf)]
        return [r.choice(times), r.choice([lambda: torch.rand(n) < 0.5, lambda: torch.rand(n), lambda: torch.zeros(n)])]
    kinds = [
        lambda: torch.randint(0, max(columns, 2), (n,)),
        lambda: torch.randint(0, 2, (n, 1)).float(),
        lambda: torch.randint(0, 2, (n, max(columns, 1))).bool(),
        lambda: torch.randint(-2, 5, (n + r.randint(0, 1),)),
        lambda: torch.rand(n),
        lambda: torch.full((n,), math.nan),
    ]
    return [r.choices(kinds, [3, 2, 3, 1, 1, 0.3])[0]]


def is_tame(x):
    """Whether no sum of these numbers overflows, and differences of them are exact enough."""
    if not x.is_floating_point():
        return True
    return (
        x.dtype in (torch.float32, torch.float64) and bool(x.isfinite().all()) and float(x.detach().abs().sum()) < 1e4
    )


def of_the_same(name, kind, value, x, others, more):
    """What a loss promises whatever it is of: its range, and the same for samples in another order and with padding."""
    plain = "weight" not in more
    slack = 1e-4 * (1 + value.detach().abs().max().item()) if value.numel() else 0
    if plain and name != "cox_loss" and value.numel():
        check(
            kind.low - slack <= value.min().item() and value.max().item() <= kind.high + slack,
            f"{value} is out of range",
        )
    n = len(x)
    if not n:
        return
    order = torch.randperm(n)
    function, extra = getattr(losses, name), {}
    for k, v in more.items():
        extra[k] = v[order] if isinstance(v, torch.Tensor) and v.ndim else v
    again = function(x[order], *(other[order] for other in others), **extra)
    check(
        torch.allclose(again, value[order] if value.ndim else value, atol=slack, rtol=1e-4),
        f"{value}, in another order {again}",
    )
    junk = torch.full_like(x[:1], math.nan).expand(2, *x.shape[1:])
    for k, v in more.items():
        extra[k] = torch.cat([v, v[:1].expand(2, *v.shape[1:])]) if isinstance(v, torch.Tensor) and v.ndim else v
    given = torch.ones(n) if more.get("weight") is None else more["weight"]
    extra["weight"] = torch.cat([given.flatten(), torch.zeros(2)])
    padded = [torch.cat([other, other[:1].expand(2, *other.shape[1:])]) for other in others]
    again = function(torch.cat([x, junk]), *padded, **extra)
    again = again[:n] if again.ndim else again
    check(torch.allclose(again, value, atol=slack, rtol=1e-4), f"{value}, with padding {again}")
