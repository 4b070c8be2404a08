"""What `inspect` finds in a model, and how it shows it."""

import copy
import io
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import chromium
from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d
from backdrop._core.draw import make_lattice
from backdrop.experiments.models import gp_network
from backdrop.placement.fields import receptive_fields
from backdrop.placement.inspection import expected_kept, inspect
from backdrop.placement.noise import gradient_noise
from backdrop.placement.savings import savings
from backdrop.placement.suggest import suggest
from backdrop.placement.surgery import insert

SMALL = (2, 1, 64, 64)


def network(mask=None):
    stage = [nn.Conv2d(1, 4, 5, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*stage, mask or Backdrop2d(0.9, exact=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class UNet(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(1 if i == 0 else 4, 4, 3, padding=1) for i in range(depth))
        self.up = nn.ModuleList(nn.ConvTranspose2d(4 if i == 0 else 8, 4, 2, 2) for i in range(depth))
        self.head = nn.Conv2d(8, 1, 1)
        self.mask = Backdrop2d(0.9, patch=4)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = layer(x).relu()
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        for layer in self.up:
            x = torch.cat([layer(x), kept.pop()], 1)
        return self.mask(self.head(x))


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a_rather_long_name_of_a_layer = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.norm(self.a_rather_long_name_of_a_layer(x)).relu()


def many_masks():
    layers = [nn.Conv2d(1, 1, 3, padding=1)]
    for i in range(30):
        layers += [nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), Backdrop2d(round(0.5 + i / 100, 3))]
    return nn.Sequential(*layers)


def restless():
    """A lattice of its own for every layer."""
    layers = [nn.Conv2d(1, 1, 3, padding=1)]
    for _ in range(40):
        layers += [nn.MaxPool2d(2), nn.Conv2d(1, 1, 3, padding=1), nn.Upsample(scale_factor=2)]
    return nn.Sequential(*layers)


MODELS = {
    "gp": lambda: (gp_network(Backdrop2d(0.99, exact=True), Backdrop2d(0.94, exact=True)), (4, 1, 1024, 1024)),
    "one layer": lambda: (nn.Sequential(nn.Conv2d(1, 1, 3)), SMALL),
    "no positions": lambda: (nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 1), Backdrop(0.9)), (2048, 20)),
    "series": lambda: (
        nn.Sequential(*(nn.Conv1d(1, 1, 9, stride=2) for _ in range(5)), Backdrop1d(0.999, shared=True), nn.Flatten()),
        (16, 1, 100_000),
    ),
    "volume": lambda: (
        nn.Sequential(
            nn.Conv3d(1, 2, 3, padding=1), nn.MaxPool3d(2), Backdrop3d(0.9, patch=(1, 2, 4)), nn.Conv3d(2, 2, 1)
        ),
        (2, 1, 20, 30, 40),
    ),
    "oblong": lambda: (nn.Sequential(nn.Conv2d(1, 2, (3, 7), stride=(1, 4)), Backdrop2d(0.5)), (2, 1, 300, 4000)),
    "unet": lambda: (UNet(), SMALL),
    "residual": lambda: (
        insert(nn.Sequential(*(Residual(2) for _ in range(60))), {"0.a_rather_long_name_of_a_layer": Backdrop2d(0.95)}),
        (1, 2, 64, 64),
    ),
    "many masks": lambda: (many_masks(), SMALL),
    "restless": lambda: (restless(), SMALL),
    "tiny input": lambda: (network(), (1, 1, 5, 5)),
}


@pytest.fixture(scope="module", params=MODELS)
def found(request):
    return inspect(*MODELS[request.param]())


def test_there_is_a_row_for_every_layer_with_its_receptive_field():
    model, shape = MODELS["gp"]()
    rows = inspect(model, shape).rows
    fields = receptive_fields(model, shape)
    assert [row.name for row in rows] == [str(i) for i in range(57)]
    for row, field in zip(rows, fields, strict=True):
        shown = (row.name, row.kind, row.shape, row.lattice, row.receptive_field, row.stride, row.note)
        assert shown == (
            *(field.name, field.kind, field.shape, field.lattice),
            *(field.size, field.stride, field.note),
        )
    assert (rows[28].lattice, rows[28].receptive_field, rows[28].stride) == ((64, 64), (91, 91), (16, 16))
    assert (rows[54].lattice, rows[54].receptive_field) == ((4, 4), (1275, 1275))
    assert rows[55].receptive_field is None


def test_functions_have_rows_and_sizes_have_none():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x):
            y = self.layer(x) + x
            return y.reshape(y.size(0), -1)

    assert [row.kind for row in inspect(Model(), SMALL).rows] == ["Conv2d", "add", "reshape"]


def test_masks_of_the_paper_keep_what_the_paper_says():
    found = inspect(*MODELS["gp"]())
    small, large = (row.mask for row in found.masks)
    assert [row.name for row in found.masks] == ["28", "54"]
    assert (small.p, small.unit, small.groups, small.units, small.kept, small.exact) == (
        0.99,
        "unit",
        4,
        4096,
        41,
        True,
    )
    assert (large.groups, large.units, large.kept) == (4, 16, 1)  # 0.96 of a unit would be none
    assert (small.batch, small.effective_batch, large.effective_batch) == (4, None, None)  # gradient_noise says


@pytest.mark.parametrize(
    ("mask", "unit"),
    [
        (Backdrop2d(0.9), "unit"),
        (Backdrop2d(0.9, exact=True), "unit"),
        (Backdrop2d(0.99), "unit"),  # most groups of 16 lose all units but the one that is kept in any case
        (Backdrop2d(0.99, exact=True), "unit"),
        (Backdrop2d(0.95, patch=3), "patch"),
        (Backdrop2d(0.8, shared=True), "unit"),
        (Backdrop2d(0.8, patch=(4, 2), shared=True, exact=True), "patch"),
        (Backdrop(0.75), "sample"),
        (Backdrop(0.9), "sample"),
        (Backdrop(0.75, exact=True), "sample"),
        (Backdrop(0.9, dims=(1, 2)), "unit"),
        (Backdrop2d(0.0), "unit"),
        (Backdrop2d(torch.tensor(0.75)), "unit"),
    ],
    ids=str,
)
def test_kept_units_are_those_of_the_mask_that_is_drawn(mask, unit):
    shape = (6, 3, 4, 4)
    found = inspect(nn.Sequential(nn.ReLU(), mask), shape)
    row = found.masks[0].mask
    lattice = make_lattice(shape, mask.dims, mask.patch)
    assert (row.unit, row.groups, row.units) == (unit, lattice.groups, lattice.size)
    draws, counts = 400, []
    corners = [slice(None, None, size) for size in dict(zip(lattice.axes, lattice.patch, strict=True)).values()]
    for _ in range(draws):
        kept = mask.draw_weight(torch.zeros(shape)) > 0
        for axis, corner in zip(lattice.axes, corners, strict=True):  # one position of every unit
            kept = kept[(slice(None),) * axis + (corner,)]
        counts.append(kept.reshape(lattice.groups, -1).sum(1))
    counts = torch.stack(counts).double().flatten()
    if row.exact:
        assert counts.unique().tolist() == [row.kept]
    else:
        assert counts.mean() == pytest.approx(row.kept, abs=4 * (counts.std() / len(counts) ** 0.5).item() + 1e-9)
    assert counts.min() >= 1


def test_a_unit_is_kept_in_any_case():
    # Of two units with p = 0.9: both with 0.01, one with 0.18, none and therefore one with 0.81.
    assert expected_kept(2, 0.9, exact=False) == pytest.approx(2 * 0.01 + 0.18 + 0.81)
    assert expected_kept(2, 0.9, exact=True) == 1
    assert expected_kept(10, 0.25, exact=True) == 8
    assert expected_kept(0, 0.5, exact=False) == expected_kept(0, 0.5, exact=True) == 0


@pytest.mark.parametrize("statistics", ["exact", "sampled", "frozen"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_skip_would_save_is_what_its_cost_model_says(statistics, device):
    model, shape = network(), (2, 1, 509, 509)
    found = inspect(model, shape, statistics=statistics, device=device)
    assert found.masks[0].mask.saving == savings(model, shape, statistics=statistics, device=device)["5"]
    assert (found.statistics, found.device) == (statistics, device)


def test_the_device_is_that_of_the_model_unless_another_is_named():
    assert inspect(network(), SMALL).device == "cpu"
    assert inspect(nn.Sequential(nn.ReLU(), Backdrop(0.5)), SMALL, device=torch.device("cuda", 1)).device == "cuda:1"


def test_a_mask_that_is_called_twice_has_two_rows():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(1, 1, 3, padding=1)
            self.mask = Backdrop2d(0.5, exact=True)

        def forward(self, x):
            return self.mask(self.layer(self.mask(self.layer(x))))

    rows = inspect(Twice(), SMALL).masks
    assert [row.name for row in rows] == ["mask", "mask (2)"]
    assert [row.mask.kept for row in rows] == [2048, 2048]


def test_inserted_masks_are_found():
    model = insert(network(nn.Identity()), {"2": Backdrop2d(0.5), "4": Backdrop2d(0.9)})
    assert [row.name for row in inspect(model, SMALL).masks] == ["2.backdrop", "4.backdrop"]


def test_the_model_and_the_random_numbers_stay_as_they_were():
    model = network().train()
    model[1].eval()
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    random = torch.get_rng_state()
    inspect(model, SMALL)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def test_layers_with_one_lattice_and_one_receptive_field_are_one_step():
    found = inspect(network(), SMALL)
    assert [[row.name for row in step.rows] for step in found.steps()] == [
        ["0", "1", "2"],
        ["3", "4"],
        ["5"],
        ["6"],
        ["7"],
    ]
    assert [step.mask is not None for step in found.steps()] == [False, False, True, False, False]
    two = inspect(nn.Sequential(nn.ReLU(), Backdrop2d(0.5), Backdrop2d(0.5)), SMALL)
    assert len(two.steps()) == 3


TABLE = """\
Sequential on an input of 2 x 1 x 64 x 64: 8 layers, one of them a mask

layer   kind               lattice  receptive field  stride
------  -----------------  -------  ---------------  ------
0 to 2  conv, norm, relu   15 x 15            5 x 5   4 x 4
3 to 4  conv, relu         15 x 15          13 x 13   4 x 4
5       Backdrop2d         15 x 15          13 x 13   4 x 4
6       AdaptiveAvgPool2d    1 x 1        unbounded       -
7       Flatten                  -        unbounded       -

mask  units                   p  kept in a step  effective batch  Skip: time  Skip: memory
----  --------------------  ---  --------------  ---------------  ----------  ------------
5     units in each sample  0.9       22 of 225                -"""


def test_it_prints_as_a_table():
    found = inspect(network(), SMALL)
    assert str(found).startswith(TABLE)
    assert f"Skip at 5: {found.masks[0].mask.saving.note}" in " ".join(str(found).split())
    assert "There are no masks yet" in str(inspect(nn.Sequential(nn.ReLU()), SMALL))


def test_unfolded_it_has_a_line_for_every_layer():
    found = inspect(network(), SMALL)
    lines = str(found.unfolded()).splitlines()
    for row in found.rows:
        assert any(line.split()[:2] == [row.name, row.kind] for line in lines)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (Backdrop2d(0.99), "about 2.4 of 225"),
        (Backdrop2d(0.5), "about 112 of 225"),
        (Backdrop2d(0.99, exact=True), " 2 of 225"),
        (Backdrop2d(0.9, patch=2, exact=True), "patches of 2 x 2 in each sample"),
        (Backdrop2d(0.9, shared=True), "units, the same in all samples"),
        (Backdrop(0.5, exact=True), " 1 of 2 "),
    ],
    ids=str,
)
def test_what_is_kept_is_said_in_words(mask, words):
    assert words in str(inspect(network(mask), SMALL))


def test_rich_shows_the_same(found):
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=300)
    console.print(found)
    shown = " ".join(console.file.getvalue().split())
    for row in found.masks:
        assert row.name in shown
    assert str(found).splitlines()[0] in shown
    narrow = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=80)
    narrow.print(found.unfolded())
    assert max(map(len, narrow.file.getvalue().splitlines())) <= 80


@pytest.mark.parametrize("name", ["rich", "matplotlib"])
def test_what_is_missing_is_named_with_how_to_get_it(name, monkeypatch, tmp_path):
    found = inspect(network(), SMALL)
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[experiments\]'"):
        found.__rich__() if name == "rich" else found.save(tmp_path / "picture.png")
    assert not any(tmp_path.iterdir())
    assert str(found).startswith(TABLE)
    assert "units in each sample" in found._repr_html_()
    assert ("<svg" in found._repr_html_()) == (name == "rich")


def test_inspecting_imports_neither_rich_nor_matplotlib():
    code = """
import sys
from torch import nn
from backdrop.placement.inspection import inspect
str(inspect(nn.Sequential(nn.ReLU()), (1, 1, 8)))
print(sorted({"rich", "matplotlib", "numpy.ma", "typer"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


class Balanced(HTMLParser):
    """Sees that every tag that is opened is closed, and what is loaded from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.open, self.words, self.elsewhere = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "path", "use"):
            self.open.append(tag)
        assert tag not in ("script", "link", "img", "iframe")
        self.elsewhere += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]

    def handle_startendtag(self, tag, attrs):
        self.elsewhere += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]

    def handle_endtag(self, tag):
        if tag not in ("path", "use"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_well_formed_and_needs_nothing_else(found, tmp_path):
    pytest.importorskip("matplotlib")
    found.save(tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Balanced(content)
    assert page.elsewhere == []
    assert "url(" not in content.replace("url(#", "")
    assert "@import" not in content
    words = " ".join(page.words)
    for row in found.rows:
        assert row.name in words
    assert "LIGHT" not in content  # the template is filled in
    svg = content[content.index("<svg") : content.index("</svg>") + 6]
    assert ElementTree.fromstring(svg).get("role") == "img"
    assert found._repr_html_() in content


def test_names_are_escaped():
    pytest.importorskip("matplotlib")
    model = type("Net<script>&'\"", (nn.Sequential,), {})(nn.Conv2d(1, 1, 3), Backdrop2d(0.5))
    found = inspect(model, SMALL)
    page = Balanced(found._repr_html_())
    assert "Net<script>&'\" on an input" in " ".join(page.words)
    pytest.importorskip("rich").print(found, file=io.StringIO())
    markup = type("Net[bold]", (nn.Sequential,), {})(nn.Conv2d(1, 1, 3))
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=200)
    console.print(inspect(markup, SMALL))
    assert "Net[bold] on" in console.file.getvalue()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_into_a_window(width, tmp_path):
    pytest.importorskip("matplotlib")
    if chromium.find() is None:
        pytest.skip("there is no Chromium")
    inspect(*MODELS["gp"]()).save(tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert chromium.look(content, width, tmp_path / "look").complaints() == []


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_files_are_the_same_whatever_matplotlib_is_told(suffix, tmp_path):
    mpl = pytest.importorskip("matplotlib")
    found = inspect(network(), SMALL)
    found.save(tmp_path / f"one.{suffix}")
    with mpl.rc_context({"font.size": 40, "font.family": "serif", "axes.facecolor": "red", "svg.fonttype": "none"}):
        before = dict(mpl.rcParams)
        found.save(str(tmp_path / f"two.{suffix}"))
        assert dict(mpl.rcParams) == before
    one, two = (path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert one == two
    assert one.startswith({"png": b"\x89PNG", "svg": b"<svg ", "html": b"<!doctype html>"}[suffix])


def test_a_file_that_is_there_is_replaced_and_a_failed_one_leaves_nothing(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    found, path = inspect(network(), SMALL), tmp_path / "picture.SVG"
    path.write_text("old")
    found.save(path)
    assert path.read_text().startswith("<svg ")
    path.write_text("old")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        found.save(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["picture.SVG"]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("picture.pdf", ValueError, "has to end in .html, .png or .svg, but got"),
        ("picture", ValueError, "has to end in"),
        ("missing/picture.png", FileNotFoundError, "there is no folder"),
        ("folder.png", IsADirectoryError, "it is a folder"),
    ],
)
def test_paths_are_checked_before_anything_is_drawn(name, error, words, tmp_path, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(error, match=words):
        inspect(network(), SMALL).save(tmp_path / name)


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "words"),
    [
        ((3, SMALL), {}, TypeError, "model has to be a torch.nn.Module, but got int"),
        ((network(), 64), {}, ValueError, "input_shape has to be the shape of a batch"),
        ((network(), (2, 3, 64, 64)), {}, ValueError, "cannot take an input of shape"),
        ((network(), SMALL), {"statistics": "none"}, ValueError, "statistics has to be one of"),
        ((network(), SMALL), {"device": "abacus"}, ValueError, "device has to be one that torch knows"),
        ((network(), SMALL), {"device": 1.5}, ValueError, "device has to be one that torch knows"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments_are_refused(arguments, settings, error, words):
    with pytest.raises(error, match=words):
        inspect(*arguments, **settings)


def boxes_of_texts(figure):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    (axes,) = figure.axes
    return [(text.get_text(), text.get_window_extent(renderer)) for text in axes.texts]


def test_no_words_lie_on_others(found):
    pytest.importorskip("matplotlib")
    from backdrop.placement.look.drawing import draw

    for titled in (True, False):
        figure = draw(found, titled=titled).figure
        placed = boxes_of_texts(figure)
        width, height = figure.get_size_inches() * figure.dpi
        for i, (words, box) in enumerate(placed):
            assert box.x0 >= 0, words
            assert box.y0 >= 0, words
            assert box.x1 <= width, words
            assert box.y1 <= height, words
            for others, other in placed[:i]:
                apart = box.x0 >= other.x1 or box.x1 <= other.x0 or box.y0 >= other.y1 or box.y1 <= other.y0
                assert apart, (words, others)


def test_no_words_lie_on_a_mask(found):
    pytest.importorskip("matplotlib")
    from matplotlib.patches import Rectangle

    from backdrop.placement.look.drawing import draw
    from backdrop.placement.look.pen import MASK

    figure = draw(found).figure
    (axes,) = figure.axes
    colours = [
        (patch, "#" + "".join(f"{round(255 * c):02x}" for c in patch.get_facecolor()[:3])) for patch in axes.patches
    ]
    bars = [patch for patch, colour in colours if isinstance(patch, Rectangle) and colour == MASK]
    assert len(bars) == len(found.masks)
    for words, box in boxes_of_texts(figure):
        for bar in bars:
            if not words.isdecimal():  # the number of a mask is in the dot at its top
                assert not box.overlaps(bar.get_window_extent()), words


def test_the_picture_tells_what_the_masks_do():
    pytest.importorskip("matplotlib")
    from backdrop.placement.look.drawing import draw

    picture = draw(inspect(*MODELS["gp"]()))
    words = [text.get_text() for text in picture.figure.axes[0].texts]
    for expected in (
        *("1024²", "512²", "64²", "4²", "91", "1275", "all", "conv, relu, norm", "max-pool", "p 0.99", "p 0.94"),
        "28: Backdrop2d, p = 0.99",
        "a position sees 91 x 91 of 1024 x 1024 cells",
        "keeps 41 of 4,096 units in each sample",
        "a position sees the whole input (1275 x 1275 cells)",
        "keeps 1 of 16 units in each sample",
    ):
        assert expected in words
    assert "28 with p = 0.99 keeps 41 of 4,096 units in each sample" in picture.alt


def test_a_batch_does_as_well_as_its_shape():
    x = torch.randn(SMALL)
    assert str(inspect(network(), x)) == str(inspect(network(), SMALL))
    assert receptive_fields(network(), x)["3"] == receptive_fields(network(), SMALL)["3"]
    assert suggest(network(), x, 9)[0].after == suggest(network(), SMALL, 9)[0].after
    with pytest.raises(ValueError, match=r"has to be the shape of a batch.* but got \(4,\)"):
        inspect(network(), torch.tensor([2, 1, 64, 64]))


def test_inspect_and_gradient_noise_mean_the_same_by_effective_batch():
    model = nn.Sequential(nn.Linear(4, 1), Backdrop(0.75, exact=True))
    (row,) = inspect(model, (64, 4)).masks
    batch = torch.randn(64, 4), torch.randn(64, 1)
    measured = gradient_noise(model, nn.functional.mse_loss, batch, seed=0).total.effective_batch_size
    assert row.mask.effective_batch == 16 == pytest.approx(measured, rel=0.25)
