"""Transformers: a callback for its `Trainer` that moves p during training and logs what the masks do.

    trainer = Trainer(..., callbacks=[BackdropCallback(partial(CosineP, start=0.0, steps=1000))])

Masks, losses and `Skip` need nothing else: put them into the model, and the loss into `compute_loss`.
"""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "backdrop.integrations.transformers needs Transformers; install it with: "
        "pip install 'transformers[torch]>=4.50'"
    ) from error

from backdrop.integrations._training import Interval, MakeSchedule, Masks
from backdrop.schedules import Schedule

__all__ = ["BackdropCallback"]


class BackdropCallback(TrainerCallback):
    """Move p with a schedule, and log p, kept units and effective batch size of Backdrop layers.

    A training step runs with the p that the schedule has for `state.global_step` (or the epoch) at its beginning. So it
    moves once per optimiser step, also where gradients are accumulated over several batches. The Trainer stores that
    counter in its checkpoints, so a run that is resumed goes on where it was; build the model with the same p.

    What is logged joins the Trainer's own log of the training loss, in `state.log_history` and in the `logs` of the
    callbacks behind this one. Those of `report_to` come before it: for them say `report_to="none"` and give both, as in
    `callbacks=[BackdropCallback(...), TensorBoardCallback()]`.

    Logged for each layer, under `backdrop/NAME/`: `p`; `kept_units`, those of a group that are kept (on average, where
    masks are not exact); and of masks on samples `effective_batch_size`, the samples of a batch times 1 - p. A batch is
    that of one process, or of all that draw a mask together (`group=`). Nothing is asked of a GPU for these numbers,
    unless p is a tensor there. With a `VarianceBudget`, `share_of_variance` too, what the mask adds by its estimate.

    Args:
        schedule: makes a schedule from the model when training starts, such as
            `partial(CosineP, start=0.0, steps=1000)`; None leaves p alone.
        interval: "step" or "epoch": what the schedule counts.
    """

    def __init__(self, schedule: MakeSchedule | None = None, *, interval: Interval = "step") -> None:
        self._masks = Masks(schedule, interval)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule, once training has started."""
        return self._masks.schedule

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._masks.start(kwargs["model"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._masks.move(self._count(state))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._masks.observe()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:  # not those of an evaluation, nor the summary at the end
            numbers = self._masks.numbers()
            logs.update(numbers)
            state.log_history[-1].update(numbers)  # which holds a copy of logs by now

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._masks.move(self._count(state))
        self._masks.stop()

    def _count(self, state: TrainerState) -> int:
        return state.global_step if self._masks.interval == "step" else int(state.epoch or 0)
