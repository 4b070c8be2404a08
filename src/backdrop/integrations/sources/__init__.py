"""Sources of what lies in files and arrays: images, volumes and series of any size, tables of any length.

    slide = from_tiff("slide.tif", transform=lambda region: region.float() / 255)
    model(slide)  # of skip_blocked: read in tiles, and again where a mask keeps positions

Each function imports the library that it is for, and none of the others. The sources can be sent to the workers of a
DataLoader, which then open the file by themselves.

`arrays.py` has what slices, `slides.py` images in files, `sets.py` sources that are made of others and of data sets.
"""

from backdrop.integrations.sources.arrays import from_array, from_hdf5, from_zarr
from backdrop.integrations.sources.sets import from_dataset, stack, with_progress
from backdrop.integrations.sources.slides import from_openslide, from_tiff

__all__ = [
    "from_array",
    "from_dataset",
    "from_hdf5",
    "from_openslide",
    "from_tiff",
    "from_zarr",
    "stack",
    "with_progress",
]
