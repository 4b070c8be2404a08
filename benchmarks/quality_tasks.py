"""The tasks of quality.py: for each its data, a network, a loss, and what is measured: the lower the better.

All are small enough for one core: a step over all training samples takes 20 to 300 ms. Every seed has training and
validation samples of its own; test samples are the same for all, or new ones where data are made.
"""

from quality_made import Bags, Contrast, Rows, Survival, Textures
from quality_photographs import Decorrelation, FiveToOne, Latent, OneInAHundred

TASKS = {
    "auc": FiveToOne,
    "rare": OneInAHundred,
    "table": Rows,
    "latent": Latent,
    "survival": Survival,
    "gp": Textures,
    "decorrelation": Decorrelation,
    "contrast": Contrast,
    "bags": Bags,
}
LEFT_OUT = {  # ways that make no sense, and why
    "latent": {"subsample": "none of ten classes is the rare one"},
    "decorrelation": {"balanced": "no classes", "subsample": "no classes"},
    "contrast": {"balanced": "no classes", "subsample": "no classes"},
    "gp": {"balanced": "as many of each class in any case", "subsample": "crops draw parts of samples"},
    "bags": {"balanced": "as many of each class in any case", "subsample": '"crops" draws instances'},
}  # and crops where samples have no parts, or only few pixels
