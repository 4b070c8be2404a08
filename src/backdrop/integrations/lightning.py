"""Lightning: a callback that moves p during training and logs what the masks do.

    trainer = Trainer(callbacks=[BackdropCallback(partial(CosineP, start=0.0, steps=1000))])

Masks, losses and `skip_blocked` need nothing else: put them into the LightningModule.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "backdrop.integrations.lightning needs Lightning; install it with: pip install 'lightning>=2.5'"
    ) from error

import torch

from backdrop.integrations._training import Interval, MakeSchedule, Masks
from backdrop.schedules import Schedule

__all__ = ["BackdropCallback"]


class BackdropCallback(Callback):
    """Move p with a schedule, and log p, kept units and effective batch size of Backdrop layers.

    A training step runs with the p that the schedule has for the trainer's `global_step` (or `current_epoch`) at its
    beginning. So it moves once per optimiser step, also where gradients are accumulated over several batches, and a
    resumed run goes on where it was. The checkpoint holds the state of the schedule, with each layer's own p.

    Logged for each layer every `log_every_n_steps`, under `backdrop/NAME/`: `p`; `kept_units`, those of a group that
    are kept (on average, where masks are not exact); and of masks on samples `effective_batch_size`, the samples of a
    batch times 1 - p. A batch is that of one process, or of all that draw a mask together (`group=`). Nothing is asked
    of a GPU for these numbers, unless p is a tensor there. With a `VarianceBudget`, `share_of_variance` too, what the
    mask adds by its estimate; it reads some of the gradient after every step.

    Args:
        schedule: makes a schedule from the LightningModule when training starts, such as
            `partial(CosineP, start=0.0, steps=1000)`; None leaves p alone. `module.trainer.estimated_stepping_batches`
            is known by then.
        interval: "step" or "epoch": what the schedule counts.
    """

    def __init__(self, schedule: MakeSchedule | None = None, *, interval: Interval = "step") -> None:
        self._masks = Masks(schedule, interval)
        self._seen = 0  # steps of the optimiser

    @property
    def schedule(self) -> Schedule | None:
        """The schedule, once training has started."""
        return self._masks.schedule

    @property
    def state_key(self) -> str:
        return self._generate_state_key(interval=self._masks.interval)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._masks.start(pl_module)
        self._seen = self._count(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._masks.move(self._count(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._count(trainer) > self._seen:  # gradients of several batches are added up before there is a step
            self._seen = self._count(trainer)
            self._masks.observe()
        if trainer._logger_connector.should_update_logs:  # as Lightning's own monitors do: logging takes its time
            # As tensors on the CPU: Lightning would put numbers on the GPU, which waits for it.
            numbers = {name: torch.tensor(number) for name, number in self._masks.numbers().items()}
            pl_module.log_dict(numbers, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._masks.move(self._count(trainer))
        self._masks.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._masks.stop()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.schedule is None else {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._masks.saved = state_dict.get("schedule")

    def _count(self, trainer: Trainer) -> int:
        return trainer.global_step if self._masks.interval == "step" else trainer.current_epoch
