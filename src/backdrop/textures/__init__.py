"""Gaussian-process textures with structure at several scales: the paper's third contribution (section 3.2).

`texture.py` has textures and data sets of them, `covariance.py` the kernels. `fields.py` draws exact random fields of
any covariance, and `sampler.py` stands between them.
"""

from backdrop.textures.covariance import Kernel, Matern, SquaredExponential, patchwork_length
from backdrop.textures.texture import PAPER_LENGTHS as PAPER_LENGTHS
from backdrop.textures.texture import PAPER_WEIGHTS as PAPER_WEIGHTS
from backdrop.textures.texture import Texture, TextureDataset, plot

__all__ = ["Kernel", "Matern", "SquaredExponential", "Texture", "TextureDataset", "patchwork_length", "plot"]
