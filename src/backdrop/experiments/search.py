"""What all searches for masks share: their scale, Optuna's sampler and its pruner.

A mask is searched for by the share of units it keeps, on a logarithmic scale from one unit to all of them: from 0.99 to
0.999 is as far as from 0 to 0.9.

>>> import optuna
>>> suggest_p(optuna.trial.FixedTrial({"keep p": 0.25}), "p", units=64)
0.75
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import BaseTrial

__all__ = ["STARTUP", "keep", "pruner", "sampler", "suggest_p"]

STARTUP = 8  # trials at random before TPE begins


def keep(name: str) -> str:
    """The name of Optuna's parameter for a mask."""
    return f"keep {name}"


def suggest_p(trial: BaseTrial, name: str, units: int) -> float:
    """A mask probability that keeps from one of `units` to all of them, on a logarithmic scale."""
    return 1.0 - trial.suggest_float(keep(name), 1 / units, 1.0, log=True)


def sampler(seed: int | None) -> BaseSampler:
    """TPE for several workers at once; one for each trial, with a seed of its own, chooses alike whoever asks."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            n_startup_trials=STARTUP,
            multivariate=True,
            constant_liar=True,  # trials that others run now count as bad ones, so workers keep apart
            seed=seed,
        )


def pruner(steps: int) -> BasePruner:
    """Ends trials that do worse than the median of the others, after a third of their steps."""
    import optuna

    return optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=steps // 3)
