"""The search for masks with a training function of one's own: `tune_masks`. What it searches is in `space`, how several
processes share the work in `joint`."""

from backdrop.experiments.masks.tune import Tuned, tune_masks

__all__ = ["Tuned", "tune_masks"]
