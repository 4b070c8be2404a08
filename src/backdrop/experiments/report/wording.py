"""Numbers, settings and times as a report words them.

>>> label({"p_small": 0.99, "p_large": 0.94, "batch_size": 4}, ["batch_size", "p_small", "p_large"])
'batch size 4, p_small 0.99, p_large 0.94'
>>> duration(4000)
'1 h 7 min'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from backdrop.experiments.report.statistics import Estimate

__all__ = [
    "capital",
    "count",
    "decimals",
    "duration",
    "interval",
    "label",
    "metric_name",
    "number",
    "plus_minus",
    "setting_name",
    "value",
]

METRICS = {
    "auc": "ROC AUC",
    "xe": "L_XE",
    "dist": "L_dist",
    "xe_minibatch": "L_XE on minibatches",
    "dist_minibatch": "L_dist on minibatches",
    "small": "accuracy at the small scale",
    "large": "accuracy at the large scale",
    "adapted_accuracy": "accuracy with adapted statistics",
    "adapted_small": "the same at the small scale",
    "adapted_large": "the same at the large scale",
    "clean": "accuracy on the attacked images, without an attack",
    "fgsm_2": "accuracy under FGSM, 2/255",
    "fgsm_8": "accuracy under FGSM, 8/255",
    "pgd_2": "accuracy under PGD-20, 2/255",
    "pgd_8": "accuracy under PGD-20, 8/255",
}


def metric_name(name: str) -> str:
    return METRICS.get(name, name.replace("_", " "))


def setting_name(name: str) -> str:
    return name if name.startswith("p_") else name.replace("_", " ")


def value(content: Any) -> str:
    """A setting's value, as the command line takes it."""
    if content is None:
        return "none"
    if isinstance(content, bool):
        return str(content).lower()
    if isinstance(content, float):
        return f"{content:.4g}"
    if isinstance(content, (list, tuple)):
        return "/".join(map(value, content))
    return str(content)


def label(settings: Mapping[str, Any], names: Sequence[str], masks: Sequence[str] = ()) -> str:
    """Some settings in words. Masks that are all off are "no masks"; settings that are none are left out."""
    plain = bool(masks) and not any(settings.get(name) for name in masks)
    shown = [name for name in names if settings.get(name) is not None and not (plain and name in masks)]
    parts = [f"{setting_name(name)} {value(settings[name])}" for name in shown]
    return ", ".join([*parts, "no masks"] if plain else parts)


def decimals(values: Iterable[float]) -> int:
    """How many are worth printing for numbers of this size: 62.1, 1.234, 0.9123, 0.0001234."""
    largest = max((abs(v) for v in values if math.isfinite(v)), default=1.0)
    if largest >= 1 or largest == 0:
        return 1 if largest >= 10 else 3
    return min(9, 3 - math.floor(math.log10(largest)))


def number(content: float, digits: int, *, signed: bool = False) -> str:
    """A number with so many decimals and a proper minus sign."""
    text = f"{content:+.{digits}f}" if signed else f"{content:.{digits}f}"
    zero = not text.strip("+-0.")
    return text.lstrip("+-") if zero else text.replace("-", "\N{MINUS SIGN}")


def plus_minus(found: Estimate, digits: int, *, signed: bool = False) -> str:
    """Mean and standard deviation."""
    mean = number(found.mean, digits, signed=signed)
    return mean if found.sd is None else f"{mean} ± {number(found.sd, digits)}"


def interval(found: Estimate, digits: int, between: str = " to ") -> str:
    """The interval's ends; nothing for a single value."""
    if found.low is None or found.high is None:
        return ""
    return f"{number(found.low, digits)}{between}{number(found.high, digits)}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def count(content: int, word: str) -> str:
    return f"{content} {word}{'s' * (content != 1)}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
