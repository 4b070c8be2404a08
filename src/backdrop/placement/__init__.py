"""Where to put masks and how strong.

The paper places masks where the receptive field matches the size of the structure (section 3.2). So can you:

>>> from torch import nn
>>> from backdrop import Backdrop2d, insert, suggest
>>> layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 5, 2, 2), nn.ReLU()]
>>> model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
>>> (found,) = suggest(model, (4, 1, 64, 64), sizes=[10])
>>> found.after, found.p
('4', (0.0, 0.86, 0.98, 0.996))
>>> masked = insert(model, {found.after: Backdrop2d(0.98)})

| | |
|---|---|
| `receptive_fields` | what every layer sees of the input: fields.py; how that is found, `backdrop.graph` |
| `suggest` | from the size of a structure to a layer: suggest.py |
| `insert`, `remove` | masks put into a model and taken out: surgery.py |
| `inspect` | tables and pictures: inspection.py; what they look like, `look`; `backdrop inspect`, command.py |
| `gradient_noise` | how noisy masks make the gradient: noise.py, gradients.py; and would at other p: forecast.py |
| `savings` | what Skip would save: savings.py |
| `doctor` | what it saves, in steps that are run: diagnosis.py, with sites.py, steps.py and rooms.py (what fits) |
"""

from backdrop.placement.diagnosis import Diagnosis, doctor
from backdrop.placement.fields import Field, Fields, receptive_fields
from backdrop.placement.forecast import Forecast
from backdrop.placement.inspection import Inspection, inspect
from backdrop.placement.noise import Noise, gradient_noise
from backdrop.placement.savings import Saving, savings
from backdrop.placement.suggest import Suggestion, Suggestions, suggest
from backdrop.placement.surgery import insert, remove

__all__ = [
    "Diagnosis",
    "Field",
    "Fields",
    "Forecast",
    "Inspection",
    "Noise",
    "Saving",
    "Suggestion",
    "Suggestions",
    "doctor",
    "gradient_noise",
    "insert",
    "inspect",
    "receptive_fields",
    "remove",
    "savings",
    "suggest",
]
