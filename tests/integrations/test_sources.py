"""Sources of files that the tests write, compared with the arrays that they were written from."""

import pickle
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from backdrop import Backdrop, Source, skip_blocked
from backdrop._source import read_region, read_rows
from backdrop.integrations.sources import (
    from_array,
    from_dataset,
    from_hdf5,
    from_openslide,
    from_tiff,
    from_zarr,
    stack,
    with_progress,
)

np = pytest.importorskip("numpy", reason="NumPy is not installed")


def numbers(*shape, kind="uint8"):
    return np.random.default_rng(0).integers(0, 250, shape).astype(kind)


def in_order(array, axes):
    """The whole array as a tensor of shape (samples, channels, *space)."""
    array = array.astype(array.dtype.newbyteorder("="))
    for letter in "cn":
        if letter not in axes:
            array, axes = array[None], letter + axes
    space = [letter for letter in axes if letter not in "nc"]
    return torch.from_numpy(array.transpose([axes.index(letter) for letter in ["n", "c", *space]]).copy())


def assert_reads(source, expected):
    assert tuple(source.shape) == tuple(expected.shape)
    assert source.dtype == expected.dtype
    space = expected.shape[2:]
    generator = torch.Generator().manual_seed(1)
    regions = [((0,) * len(space), tuple(space)), ((0,) * len(space), (1,) * len(space))]
    for _ in range(12):
        ends = [torch.randint(n + 1, (2,), generator=generator).sort().values.tolist() for n in space]
        regions.append(tuple(zip(*ends, strict=True)) if ends else ((), ()))
    for sample in range(len(expected)):
        for low, high in regions:
            found = read_region(source, sample, low, high)
            assert torch.equal(found, expected[(sample, slice(None), *map(slice, low, high))])
            assert found.is_contiguous()
    many = torch.randint(len(expected), (50,), generator=generator)
    for rows in (many, many[:0], many.unique(), many.sort().values, torch.arange(len(expected))):
        assert torch.equal(read_rows(source, rows), expected[rows])


ARRAYS = [
    (numbers(37, 53, 3), "yxc"),
    (numbers(3, 37, 53), "cyx"),
    (numbers(37, 53), "yx"),
    (numbers(5, 37, 53, 2), "nyxc"),
    (numbers(9, 11, 13, kind="int16"), "zyx"),
    (numbers(2, 9, 11, 13, 4, kind="float64"), "nzyxc"),
    (numbers(1000, kind="float32"), "t"),
    (numbers(200, 7, kind="float32"), "nc"),
    (numbers(7, 200, kind="float32"), "cn"),
    (numbers(12, 10, kind=">f4"), "yx"),
    (numbers(12, 10, kind="bool"), "yx"),
    (numbers(12, 10, kind="uint16"), "YX"),
]
IDS = [f"{axes} {array.dtype}" for array, axes in ARRAYS]
each = pytest.mark.parametrize(("array", "axes"), ARRAYS, ids=IDS)


@each
def test_arrays(array, axes):
    assert_reads(from_array(array, axes), in_order(array, axes.lower()))


@each
def test_maps_of_files(array, axes, tmp_path):
    np.save(tmp_path / "array.npy", array)
    source = from_array(tmp_path / "array.npy", axes)
    assert isinstance(source.array, np.memmap)
    assert_reads(source, in_order(array, axes.lower()))
    assert_reads(pickle.loads(pickle.dumps(source)), in_order(array, axes.lower()))


def test_a_memory_map_is_never_sent_as_a_whole(tmp_path):
    np.save(tmp_path / "array.npy", numbers(20, 20))
    opened = np.load(tmp_path / "array.npy", mmap_mode="r")
    source = from_array(opened, "yx")
    assert_reads(source, in_order(np.asarray(opened), "yx"))
    with pytest.raises(TypeError, match=r"from_array the path of a .npy file"):
        pickle.dumps(source)


def test_tensors():
    x = torch.randn(3, 2, 8, 9)
    assert_reads(from_array(x, "ncyx"), x)
    assert_reads(from_array(x.half().permute(0, 2, 3, 1), "nyxc"), x.half())


@each
def test_zarr(array, axes, tmp_path):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    group = zarr.open_group(tmp_path / "image.zarr", mode="w")
    native = array.astype(array.dtype.newbyteorder("="))
    made = group.create_array if hasattr(group, "create_array") else group.create_dataset
    made("0", shape=native.shape, dtype=native.dtype, chunks=tuple(min(7, n) for n in array.shape))[...] = native
    expected = in_order(array, axes.lower())
    assert_reads(from_zarr(tmp_path / "image.zarr", "0", axes), expected)
    assert_reads(from_zarr(tmp_path / "image.zarr" / "0", axes=axes), expected)
    assert_reads(pickle.loads(pickle.dumps(from_zarr(tmp_path / "image.zarr", "0", axes))), expected)
    assert_reads(from_array(zarr.open(tmp_path / "image.zarr", mode="r")["0"], axes), expected)
    with pytest.raises(ValueError, match=r"group of zarr.*'0'"):
        from_zarr(tmp_path / "image.zarr", axes=axes)


@each
def test_hdf5(array, axes, tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(tmp_path / "image.h5", "w") as file:
        file.create_dataset("a/b", data=array, chunks=tuple(min(7, n) for n in array.shape))
    expected = in_order(array, axes.lower())
    source = from_hdf5(tmp_path / "image.h5", "a/b", axes)
    assert_reads(source, expected)
    assert_reads(pickle.loads(pickle.dumps(source)), expected)
    with pytest.raises(ValueError, match=r"no data set 'a'; it has 'a/b'"):
        from_hdf5(tmp_path / "image.h5", "a", axes)


TIFFS = [
    ((70, 90, 3), {"photometric": "rgb", "tile": (32, 16)}, "yxc"),
    ((70, 90, 3), {"photometric": "rgb", "tile": (32, 16), "compression": "zlib", "predictor": True}, "yxc"),
    ((3, 70, 90), {"photometric": "rgb", "planarconfig": "separate", "tile": (32, 16), "compression": "zlib"}, "cyx"),
    ((70, 90), {"tile": (16, 32), "compression": "zlib"}, "yx"),
    ((70, 90, 3), {"photometric": "rgb", "rowsperstrip": 13, "compression": "zlib"}, "yxc"),
    ((70, 90, 3), {"photometric": "rgb"}, "yxc"),  # as it would lie in memory
    ((5, 70, 90), {"tile": (32, 16), "compression": "zlib", "metadata": {"axes": "ZYX"}}, "zyx"),
    ((5, 70, 90), {"tile": (32, 16), "compression": "zlib", "metadata": {"axes": "CYX"}}, "cyx"),
    ((2, 5, 70, 90), {"tile": (32, 16), "compression": "zlib", "metadata": {"axes": "CZYX"}}, "czyx"),
    ((5, 70, 90), {"metadata": {"axes": "ZYX"}}, "zyx"),
    ((70, 90, 3), {"photometric": "rgb", "tile": (32, 16), "byteorder": ">"}, "yxc"),
]


@pytest.mark.parametrize(("shape", "how", "axes"), TIFFS)
@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_tiff(shape, how, axes, kind, tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    array, how = numbers(*shape, kind=kind), dict(how)
    order = how.pop("byteorder", None)
    with tifffile.TiffWriter(tmp_path / "image.tif", byteorder=order) as file:
        file.write(array, **how)
    source = from_tiff(tmp_path / "image.tif")
    assert_reads(source, in_order(array, axes))
    assert_reads(pickle.loads(pickle.dumps(source)), in_order(array, axes))


@pytest.fixture
def pyramid(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    levels = [numbers(512, 700, 3), numbers(256, 350, 3), numbers(128, 175, 3)]
    with tifffile.TiffWriter(tmp_path / "pyramid.tif") as file:
        file.write(levels[0], subifds=2, tile=(64, 64), photometric="rgb", compression="zlib")
        for level in levels[1:]:
            file.write(level, subfiletype=1, tile=(64, 64), photometric="rgb", compression="zlib")
    return tmp_path / "pyramid.tif", levels


def test_levels_of_a_pyramid(pyramid):
    path, levels = pyramid
    for i, level in enumerate(levels):
        assert_reads(from_tiff(path, level=i), in_order(level, "yxc"))
    with pytest.raises(ValueError, match="3 levels, but got level=3"):
        from_tiff(path, level=3)
    with pytest.raises(ValueError, match="1 series of images, but got series=1"):
        from_tiff(path, series=1)


def test_of_a_tiff_only_tiles_are_read_that_a_region_lies_in(pyramid, monkeypatch):
    path, _ = pyramid
    source = from_tiff(path)
    read, kind = [], type(source.array.file.filehandle)
    whole = kind.read_segments

    def watched(self, offsets, *more, **named):
        read.extend(offsets)
        return whole(self, offsets, *more, **named)

    monkeypatch.setattr(kind, "read_segments", watched)
    read_region(source, 0, (64, 63), (128, 129))
    assert len(read) == 3


def test_a_large_compressed_piece_is_refused(tmp_path, monkeypatch):
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    tifffile.imwrite(tmp_path / "image.tif", numbers(300, 300), compression="zlib", rowsperstrip=300)
    monkeypatch.setattr("backdrop.integrations.sources.slides.LARGEST_PIECE", 300 * 300 - 1)
    with pytest.raises(ValueError, match=r"compressed in pieces of 300 x 300.*write it in tiles"):
        from_tiff(tmp_path / "image.tif")


def test_axes_that_a_tiff_does_not_say(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    tifffile.imwrite(
        tmp_path / "image.tif", numbers(4, 70, 90), compression="zlib", metadata=None, photometric="minisblack"
    )
    array = tifffile.imread(tmp_path / "image.tif")
    assert_reads(from_tiff(tmp_path / "image.tif", "nyx"), in_order(array, "nyx"))


def of_openslide(path):
    pytest.importorskip("openslide", reason="OpenSlide is not installed")
    return from_openslide(path)


def test_openslide(pyramid):
    path, levels = pyramid
    source = of_openslide(path)
    assert_reads(source, in_order(levels[0], "yxc"))
    assert_reads(pickle.loads(pickle.dumps(source)), in_order(levels[0], "yxc"))
    with pytest.raises(ValueError, match="levels, but got level=9"):
        from_openslide(path, level=9)


class FakeSlide:
    """As OpenSlide, for a slide whose coarse level is not a whole number of times smaller than the fine one."""

    level_dimensions = ((1700, 1300), (1133, 866))
    level_downsamples = (1.0, 1.5005)
    properties = {"openslide.background-color": "0A141E"}  # noqa: RUF012

    def __init__(self, path):
        self.fine = numbers(2600, 3400, 4)
        self.fine[..., 3] = np.where(self.fine[..., 3] < 100, 0, 255)

    def close(self):
        pass

    def read_region(self, corner, level, size):
        x, y = corner if level == 0 else (round(at / 1.5005 * 2) for at in corner)  # by half pixels
        step = 1 if level == 0 else 2
        return self.fine[y : y + step * size[1] : step, x : x + step * size[0] : step]


def test_levels_that_are_not_whole_numbers_apart(monkeypatch):
    module = type(sys)("openslide")
    module.OpenSlide = FakeSlide
    monkeypatch.setitem(sys.modules, "openslide", module)
    source = from_openslide("slide", level=1)
    assert_reads(source, read_region(source, 0, (0, 0), (866, 1133))[None])
    whole = from_openslide("slide")
    pixel = whole.array.slide.fine[3, 5]
    expected = pixel[:3] if pixel[3] else np.array([10, 20, 30])
    assert read_region(whole, 0, (3, 5), (4, 6)).flatten().tolist() == expected.tolist()
    empty = np.argwhere(whole.array.slide.fine[:1300, :1700, 3] == 0)[0]
    assert read_region(whole, 0, empty, empty + 1).flatten().tolist() == [10, 20, 30]


def test_a_transform_of_regions():
    array = numbers(20, 30, 3)
    expected = in_order(array, "yxc").float() / 255
    assert_reads(from_array(array, "yxc", transform=lambda region: region.float() / 255), expected)
    assert_reads(
        from_array(array, "yxc", transform=lambda region: region.float() / 255, dtype=torch.float64), expected.double()
    )
    assert_reads(from_array(array, "yxc", dtype=torch.float32), in_order(array, "yxc").float())
    grey = from_array(array, "yxc", transform=lambda region: region.double().mean(0, keepdim=True))
    assert_reads(grey, in_order(array, "yxc").double().mean(1, keepdim=True))
    table = numbers(50, 6, kind="float32")
    assert_reads(from_array(table, "nc", transform=lambda row: row[:4] - 3), torch.from_numpy(table[:, :4] - 3))


def clear(region):
    return region.float().sub_(region.float().mean())


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (lambda region: region / region.max(), "whatever lies around it"),
        (clear, "whatever lies around it"),
        (lambda region: region.float() + torch.rand(region.shape), "drawn at random"),
        (lambda region: region.flip(-1), "whatever lies around it"),
        (lambda region: nn.functional.avg_pool2d(region.float(), 3, 1, 1), "whatever lies around it"),
        (lambda region: region[:, ::2], "with the space that it is given"),
        (lambda region: region.numpy(), "with the space that it is given"),
        (lambda region: region[0], "with the space that it is given"),
    ],
)
def test_a_transform_that_depends_on_what_lies_around_is_refused(transform, said):
    with pytest.raises(ValueError, match="transform has to give") as caught:
        from_array(numbers(40, 40, 3), "yxc", transform=transform)
    assert said in str(caught.value)


REFUSED = [
    (lambda: from_array([1, 2], "n"), TypeError, ["shape, dtype and slices", "list"]),
    (lambda: from_array(numbers(4, 5), "yxc"), ValueError, ["axes has to be", "(4, 5)", "'yxc'"]),
    (lambda: from_array(numbers(4, 5), "yy"), ValueError, ["different letter", "'yy'"]),
    (lambda: from_array(numbers(4, 5), ""), ValueError, ["axes has to be"]),
    (lambda: from_array(numbers(4, 5), 2), TypeError, ["axes has to be a string", "2"]),
    (lambda: from_array(numbers(4, 5), "yx", transform=3), TypeError, ["transform", "int"]),
    (lambda: from_array(numbers(4, 5), "yx", dtype="float32"), TypeError, ["dtype", "'float32'"]),
    (lambda: from_array(np.array(["a", "b"]), "n"), TypeError, ["torch has no dtype for"]),
    (lambda: from_array("nowhere.npy", "yx"), FileNotFoundError, ["nowhere.npy"]),
    (lambda: stack([]), ValueError, ["at least one source"]),
    (
        lambda: stack([from_array(numbers(4, 5), "yx"), from_array(numbers(4, 6), "yx")]),
        ValueError,
        ["same shape and dtype", "(1, 1, 4, 6)", "step of their own"],
    ),
    (lambda: from_dataset(3), TypeError, ["length and items", "int"]),
    (lambda: from_dataset([]), ValueError, ["at least one item"]),
    (lambda: from_dataset(DataLoader([torch.ones(2)])), TypeError, ["length and items", "DataLoader", "its .dataset"]),
    (lambda: from_dataset([(torch.ones(2), 1)]), TypeError, ["part=None", "tuple"]),
    (lambda: from_dataset([torch.tensor(1.0)]), ValueError, ["axis of channels"]),
]


@pytest.mark.parametrize(("call", "kind", "parts"), REFUSED)
def test_what_cannot_be_a_source_is_refused(call, kind, parts):
    with pytest.raises(kind) as caught:
        call()
    assert [part for part in parts if part not in str(caught.value)] == []


def test_sources_of_several_files():
    arrays = [numbers(20, 30, 3), numbers(20, 30, 3) + 1, numbers(2, 20, 30, 3)]
    sources = [from_array(array, "yxc" if array.ndim == 3 else "nyxc") for array in arrays]
    assert_reads(
        stack(sources), torch.cat([in_order(arrays[0], "yxc"), in_order(arrays[1], "yxc"), in_order(arrays[2], "nyxc")])
    )


def test_data_sets():
    x, y = torch.randn(40, 3, 8, 9), torch.arange(40)
    assert_reads(from_dataset(TensorDataset(x, y), 0), x)
    assert_reads(from_dataset([{"image": image} for image in x], "image"), x)
    with pytest.raises(ValueError, match="the same item every time"):
        from_dataset(Noisy())


class Noisy(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.rand(2)


class Slides(Dataset):
    """Images of different sizes in files of their own, with a label each."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return from_array(self.paths[index], "yxc", transform=scaled), index % 2


def scaled(region):
    return region.float() / 255


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_hands_sources_on(workers, tmp_path):
    arrays = [numbers(16 + 7 * i, 24 - i, 3) for i in range(4)]
    for i, array in enumerate(arrays):
        np.save(tmp_path / f"{i}.npy", array)
    loader = DataLoader(
        Slides([tmp_path / f"{i}.npy" for i in range(4)]),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    seen = 0
    for (source, label), array in zip(loader, arrays, strict=True):
        assert isinstance(source, Source)
        assert label == seen % 2
        assert_reads(source, in_order(array, "yxc").float() / 255)
        seen += 1
    assert seen == 4


def test_a_model_trains_on_what_a_file_holds(tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    values = numbers(500, 5, kind="float64")
    with h5py.File(tmp_path / "table.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(32, 5))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1), Backdrop(0.9, exact=True)).double()
    model = skip_blocked(plain, at_once=50)
    for each_model, x in ((plain, torch.from_numpy(values)), (model, from_hdf5(tmp_path / "table.h5", "x", "nc"))):
        torch.manual_seed(1)
        (each_model(x) ** 2).mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_progress_bar(capsys):
    pytest.importorskip("rich", reason="rich is not installed")
    array = numbers(64, 64, 3)
    source = with_progress(from_array(array, "yxc"), "slide 1")
    assert repr(source) == repr(from_array(array, "yxc"))
    with source:
        for top in range(0, 64, 16):
            read_region(source, 0, (top, 0), (top + 16, 64))
        read_region(source, 0, (0, 0), (16, 64))
        (task,) = source._bar.tasks
        assert task.completed == 1
        assert task.fields["megabytes"] == pytest.approx(5 * 16 * 64 * 3 / 1e6)
    assert "slide 1" in capsys.readouterr().out
    assert_reads(pickle.loads(pickle.dumps(source)), in_order(array, "yxc"))  # without its block it is plain
