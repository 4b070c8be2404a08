"""Masks behind stages of timm's models: the right module, the right layout, the same weights."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop2d, insert, remove
from backdrop.integrations.timm import insert_masks, stages
from foreign import import_or_skip

SIZE = 64
MODELS = {  # the module of reduction 16, and its number
    "resnet18": ("layer3", 3),
    "convnext_atto": ("stages.2", 2),
    "efficientnet_b0": ("blocks.4", 3),
}
IMAGE = (1, 3, SIZE, SIZE)


def create(name, **settings):
    torch.manual_seed(0)
    return import_or_skip("timm").create_model(name, num_classes=3, **settings).eval()


def gradient_behind(model, name, x):
    """What arrives behind the module of this name, having passed its mask; norms and dropout are in evaluation."""
    mask, found = model.get_submodule(name).backdrop, {}

    def note(layer, args):
        args[0].register_hook(lambda grad: found.update(grad=grad))

    mask.train().register_forward_pre_hook(note)
    outputs = model(x)
    (outputs[-1] if isinstance(outputs, list) else outputs).square().sum().backward()
    return found["grad"]


@pytest.mark.parametrize("name", MODELS)
def test_stages_go_by_name_by_number_and_by_reduction(name):
    model = create(name)
    module, number = MODELS[name]
    assert stages(model)[number].name == module
    for masks, by in (({module: 0.75}, "name"), ({number: 0.75}, "stage"), ({16: 0.75}, "reduction")):
        masked = insert_masks(model, masks, by=by)
        found = [path for path, layer in masked.named_modules() if isinstance(layer, Backdrop)]
        assert found == [f"{module}.backdrop"]
    x = torch.randn(2, *IMAGE[1:])
    grad = gradient_behind(masked, module, x)
    assert grad.shape[2:] == (SIZE // 16, SIZE // 16)
    kept = (grad != 0).any(1)
    assert 0 < kept.sum() < kept.numel()
    assert torch.equal((grad != 0).all(1), kept)  # channels share the mask
    assert torch.equal(masked.eval()(x), model(x))


@pytest.mark.parametrize("name", MODELS)
def test_weights_go_from_one_to_the_other(name):
    model = create(name)
    masked = insert_masks(model, {8: Backdrop2d(0.9, patch=2), 16: 0.5}, by="reduction")
    assert masked.state_dict().keys() == model.state_dict().keys()
    masked.load_state_dict(model.state_dict())
    plain = remove(masked)
    plain.load_state_dict(masked.state_dict())
    assert not any(isinstance(module, Backdrop) for module in plain.modules())
    assert not any(isinstance(module, Backdrop) for module in model.modules())


TINY = {"depths": (1, 1, 2, 1), "num_heads": (1, 1, 1, 1), "embed_dim": 16, "img_size": SIZE, "window_size": 4}


@pytest.mark.parametrize(
    ("name", "settings", "stage", "dims"),
    [
        ("vit_tiny_patch16_224", {"img_size": SIZE, "depth": 3}, 0, (0, 1)),  # tokens
        ("swin_tiny_patch4_window7_224", TINY, 1, (0, 1, 2)),  # channels last
        ("convnext_atto", {"depths": (1, 1, 1, 1)}, 1, (0, 2, 3)),
    ],
)
def test_a_p_drops_positions_whatever_the_layout(name, settings, stage, dims):
    model = create(name, **settings)
    masked = insert_masks(model, {stage: 0.7}, by="stage", input_shape=IMAGE)
    mask = masked.get_submodule(stages(model)[stage].name).backdrop
    assert mask.dims == dims
    grad = gradient_behind(masked, stages(model)[stage].name, torch.randn(2, *IMAGE[1:]))
    channels = next(axis for axis in range(1, grad.ndim) if axis not in dims)
    assert grad.shape[channels] == stages(model)[stage].channels
    kept = (grad != 0).any(channels)
    assert 0 < kept.sum() < kept.numel()
    assert torch.equal((grad != 0).all(channels), kept)
    assert not torch.equal(kept[0], kept[1])  # every sample has its own


def test_models_that_return_features():
    model = create("convnext_atto", depths=(1, 1, 1, 1), features_only=True)
    masked = insert_masks(model, {2: 0.7}, by="stage")
    assert type(masked.stages_2.backdrop) is Backdrop2d
    grad = gradient_behind(masked, "stages_2", torch.randn(1, 3, 96, 96))
    assert 0 < (grad != 0).any(1).sum() < 36


def test_a_layer_goes_behind_any_module_as_with_insert():
    model = create("resnet18")
    for masked in (insert_masks(model, {"layer2.0": Backdrop2d(0.9)}), insert(model, {"layer2.0": Backdrop2d(0.9)})):
        assert repr(masked.layer2[0].backdrop) == "Backdrop2d(p=0.9)"


def test_what_is_refused():
    resnet = create("resnet18")
    vit = create("vit_tiny_patch16_224", img_size=SIZE, depth=2)
    for model, masks, settings, message in (
        (resnet, {5: 0.5}, {"by": "stage"}, "from 0 to 4, but got 5"),
        (resnet, {"layer3": 0.5}, {"by": "stage"}, "from 0 to 4, but got 'layer3'"),
        (resnet, {3: 0.5}, {"by": "reduction"}, r"0 stages have a reduction of 3; there are act1 \(2\), layer1 \(4\)"),
        (vit, {16: 0.5}, {"by": "reduction"}, "2 stages have a reduction of 16; .* choose by 'stage'"),
        (resnet, {"layer3": 0.5}, {"by": "depth"}, "'name', 'stage' or 'reduction', but got 'depth'"),
        (resnet, {"layer2.0": 0.5}, {}, "'layer2.0' is not known, because it is no stage of timm's; give a Backdrop"),
        (resnet, {"layer9": 0.5}, {}, "'layer9' is not known, because it is no module of ResNet"),
        (resnet, {"layer9": Backdrop2d()}, {}, "no such module; the nearest are 'layer4'"),
        (resnet, {"layer3": 1.5}, {}, r"p has to be in \[0, 1\), but got 1.5"),
        (vit, {"blocks.0": 0.5}, {}, r"does not take an input of shape \(1, 3, 224, 224\) .*; give input_shape"),
        (nn.Sequential(nn.Linear(1, 1)), {0: 0.5}, {"by": "stage"}, "Sequential has no feature_info, .*; name modules"),
    ):
        with pytest.raises(ValueError, match=message):
            insert_masks(model, masks, **settings)
    assert not any(module._forward_hooks for module in [*resnet.modules(), *vit.modules()])


def test_the_code_of_the_page_runs(capsys):
    import_or_skip("timm")
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "timm.md").read_text()
    (code,) = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = {"__name__": "page"}
    exec(compile(code, "timm.md", "exec"), names)
    assert "2 stages.2 160 16\n" in capsys.readouterr().out
    assert len({str(names[name]) for name in ("masked", "same", "same_again")}) == 1
