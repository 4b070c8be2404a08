"""The paper as runnable studies. Needs the extra: `pip install '.[experiments]'`."""

from backdrop.experiments.masks import tune_masks

__all__ = ["tune_masks"]
