"""Models that others wrote, small and with random weights: what bench_coverage.py goes through.

Each entry says how a model is made, what it takes, and behind which module a mask of positions goes: the second stage
of a classifier, the last block of a decoder, a block of a transformer. All that lies before goes through that module;
where a network has no such place, it has sample masks alone. `kind`, `norm` and `pooled` tell what lies before the
mask.
"""

import importlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode

from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
AWAY = {  # what no entry stands for, and why
    "torchvision's detection models": "their operations are compiled, in wheels that want a torch of their own",
}


def foreign(name):
    """A library from where the Makefile puts those that others must not see, with placeholders for torchvision's
    compiled part."""
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            _LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    aside = str(Path(sys.prefix) / "foreign")
    sys.path.append(aside)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(aside)


@dataclass(frozen=True)
class Entry:
    name: str
    library: str
    make: Callable[[], nn.Module]
    large: tuple[int, ...]  # the shape of the input under a mask of positions
    small: tuple[int, ...]  # under a mask of samples
    mask: str | None  # behind this module; without one, there are no masks of positions
    axes: str = "2d"  # what positions are: 1d, 2d, 3d, tokens (N, L, C), or a grid (N, H, W, C)
    kind: str = "conv"  # or attention, or mlp (whatever mixes all positions in a fixed way)
    norm: str = "batch"  # or layer (over the channels of a position), none; group, instance, response (over positions)
    pooled: bool = False  # branches that see the mean of all positions: squeeze-and-excite and its like
    couples: bool = False  # samples depend on each other, apart from batch statistics
    words: int = 0  # inputs are numbers of so many words, and not real numbers

    @property
    def convolutional(self) -> bool:
        """One of those that goals are set for under masks of positions."""
        return self.mask is not None and self.kind == "conv" and self.norm in ("batch", "layer", "none")

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().double().train()
        shake(model)
        return model

    def inputs(self, shape, seed=0) -> dict[str, Tensor] | Tensor:
        generator = torch.Generator().manual_seed(seed)
        if not self.words:
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        words = torch.randint(self.words, shape, generator=generator)
        mask = torch.ones(shape, dtype=torch.int64)
        mask[0, -2:] = 0  # a shorter text
        return {"input_ids": words, "attention_mask": mask}

    def positions(self, p, generator) -> Backdrop:
        """A mask that keeps at least one position."""
        if self.axes in ("tokens", "grid"):
            return Backdrop(p, (0, 1) if self.axes == "tokens" else (0, 1, 2), exact=True, generator=generator)
        layer = {"1d": Backdrop1d, "2d": Backdrop2d, "3d": Backdrop3d}[self.axes]
        return layer(p, exact=True, generator=generator)


class InFloat64(TorchFunctionMode):
    """What a model casts to float32 on its way, as attention and norms do, stays in float64: a difference that is left
    is none of rounding in there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif func is torch.Tensor.to:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@torch.no_grad()
def shake(model) -> None:
    """Away from zeros and ones: branches that are scaled by zero at first would hide what is wrong in them."""
    for parameter in model.parameters():
        if (parameter == parameter.flatten()[0]).all():
            parameter += 0.3 * torch.randn_like(parameter)


def silence(model) -> bool:
    """Switch all dropout off, layers left out by chance and masked time steps included; whether there was any."""
    found = False
    for module in model.modules():
        holders = [module.__dict__, *(vars(h) for h in (module.__dict__.get("config"),) if hasattr(h, "__dict__"))]
        for values in holders:
            for name, value in list(values.items()):
                if "drop" in name and isinstance(value, float) and value > 0:
                    values[name], found = 0.0, True
            if values.get("apply_spec_augment"):
                values["apply_spec_augment"], found = False, True
        is_dropout = "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth"
        if is_dropout and isinstance(getattr(module, "p", None), float) and module.p > 0:
            module.p, found = 0.0, True
    return found


def has_batch_statistics(model) -> bool:
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


@torch.no_grad()
def freeze_norms(model, run) -> None:
    """Batch normalisation in eval mode, with the statistics of what `run` gives to the model."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        run(model)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
        norm.eval()


# Networks of this file ------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A basic block in any number of dimensions."""

    def __init__(self, dims, channels, out, stride):
        super().__init__()
        convolution = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
        norm = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[dims]
        self.conv1 = convolution(channels, out, 3, stride, 1, bias=False)
        self.norm1 = norm(out)
        self.conv2 = convolution(out, out, 3, 1, 1, bias=False)
        self.norm2 = norm(out)
        self.act = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(convolution(channels, out, 1, stride, bias=False), norm(out))

    def forward(self, x):
        out = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.act(out)


class ResNet(nn.Module):
    def __init__(self, dims, inputs, width=8):
        super().__init__()
        convolution, pool, norm = {
            1: (nn.Conv1d, nn.MaxPool1d, nn.BatchNorm1d),
            3: (nn.Conv3d, nn.MaxPool3d, nn.BatchNorm3d),
        }[dims]
        self.stem = nn.Sequential(
            convolution(inputs, width, 7, 2, 3, bias=False), norm(width), nn.ReLU(inplace=True), pool(3, 2, 1)
        )
        self.layer1 = Residual(dims, width, width, 1)
        self.layer2 = Residual(dims, width, 2 * width, 2)
        self.layer3 = Residual(dims, 2 * width, 4 * width, 2)
        self.head = nn.Linear(4 * width, 5)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.head(x.flatten(2).mean(2))


class Causal(nn.Module):
    """A block of a temporal convolutional network: padded on both sides, the future cut off."""

    def __init__(self, channels, out, dilation, kernel=3, dropout=0.2):
        super().__init__()
        self.cut = (kernel - 1) * dilation
        self.conv1 = weight_norm(nn.Conv1d(channels, out, kernel, padding=self.cut, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(out, out, kernel, padding=self.cut, dilation=dilation))
        self.dropout = nn.Dropout(dropout)
        self.shortcut = nn.Conv1d(channels, out, 1)

    def forward(self, x):
        out = self.dropout(self.conv1(x)[:, :, : -self.cut].relu())
        out = self.dropout(self.conv2(out)[:, :, : -self.cut].relu())
        return torch.relu(out + self.shortcut(x))


class TCN(nn.Module):
    def __init__(self, inputs=4, width=12, levels=4):
        super().__init__()
        widths = [inputs] + [width] * levels
        self.network = nn.Sequential(*(Causal(a, b, 2**i) for i, (a, b) in enumerate(itertools.pairwise(widths))))
        self.head = nn.Conv1d(width, 5, 1)

    def forward(self, x):
        return self.head(self.network(x))


class WaveNet(nn.Module):
    """Gated dilated convolutions; what comes out is the sum of what each of them adds."""

    def __init__(self, inputs=1, width=8, layers=6):
        super().__init__()
        self.first = nn.Conv1d(inputs, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2 ** (i % 4)) for i in range(layers))
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.skips = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.post = nn.Sequential(nn.ReLU(), nn.Conv1d(2 * width, 2 * width, 1), nn.ReLU())
        self.head = nn.Conv1d(2 * width, 16, 1)

    def forward(self, x):
        x, total = self.first(x), 0
        for gate, mix, skip in zip(self.gates, self.mixes, self.skips, strict=True):
            signal, opened = gate(nn.functional.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            out = signal.tanh() * opened.sigmoid()
            total = total + skip(out)
            x = x + mix(out)
        return self.head(self.post(total))


class Discriminator(nn.Module):
    """Progressive growing: the standard deviation over the batch is one more channel, so samples are coupled."""

    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.Sequential()
        for i in range(3):
            channels = width * 2 ** (i - 1) if i else 3
            self.blocks.append(nn.Conv2d(channels, width * 2**i, 3, padding=1))
            self.blocks.append(nn.LeakyReLU(0.2))
            self.blocks.append(nn.AvgPool2d(2))
        self.last = nn.Conv2d(width * 4 + 1, width * 4, 3, padding=1)
        self.head = nn.Linear(width * 4, 1)

    def forward(self, x):
        x = self.blocks(x)
        spread = x.var(0, unbiased=False).add(1e-8).sqrt().mean().expand(len(x), 1, *x.shape[2:])
        return self.head(self.last(torch.cat([x, spread], 1)).relu().mean((2, 3)))


# Entries --------------------------------------------------------------------------------------------------------------


def images(name, library, make, mask, size=96, small=64, batch=1, **flags):
    return Entry(name, library, make, (batch, 3, size, size), (8, 3, small, small), mask, **flags)


def in_timm(name, mask, size=96, small=64, batch=1, fixed=False, settings=None, where=None, **flags):
    """`fixed` for those that are built for one size of image; `where` is the class of those whose depth timm fixes by
    the name, and classes among the settings are looked up beside it."""
    settings = dict(settings or {}, num_classes=5, **({"img_size": size} if fixed else {}))

    def make():
        if where is None:
            return foreign("timm").create_model(name, **settings)
        module, kind = where.split(".")
        module = foreign(f"timm.models.{module}")
        given = {key: getattr(module, value) if key.endswith("_layer") else value for key, value in settings.items()}
        return getattr(module, kind)(**given)

    return images(name, "timm", make, mask, size, size if fixed else small, batch, **flags)


SHALLOW = {"layers": (2, 2, 1, 1)}
LAYER = {"norm": "layer"}
TOKENS = {"kind": "attention", "norm": "layer", "axes": "tokens", "size": 64, "fixed": True}
POOLED = {"pooled": True}


def timm_entries():
    yield in_timm("resnet18", "layer2")
    yield in_timm("resnet50", "layer2", settings=SHALLOW)
    yield in_timm("resnet18d", "layer2")
    yield in_timm("seresnet18", "layer2", **POOLED)
    yield in_timm("skresnet18", "layer2", batch=2, **POOLED)
    yield in_timm("ecaresnet26t", "layer2", **POOLED)
    yield in_timm("resnest14d", "layer2", batch=2, **POOLED)
    yield in_timm("resnext50_32x4d", "layer2", settings=SHALLOW)
    yield in_timm("wide_resnet50_2", "layer2", settings={"layers": (1, 1, 1, 1)})
    yield in_timm("res2net50_14w_8s", "layer2", settings={"layers": (1, 1, 1, 1)})
    yield in_timm("resnetv2_50", "stages.1", settings=SHALLOW)
    yield in_timm("resnetv2_50x1_bit", "stages.1", norm="group")
    yield in_timm("nf_resnet26", "stages.1", norm="none")
    yield in_timm("nf_regnet_b0", "stages.1", norm="none", **POOLED)
    yield in_timm("gcresnext26ts", "stages.1", **POOLED)
    yield in_timm("botnet26t_256", "stages.1", size=128, fixed=True)
    yield in_timm("cspresnet50", "stages.1")
    yield in_timm("tresnet_m", "body.layer2", settings={"layers": (1, 2, 1, 1)}, **POOLED)
    yield in_timm("densenet121", "features.transition2", settings={"block_config": (3, 4, 3, 2)})
    yield in_timm("dpn48b", "features.conv5_bn_ac")
    yield in_timm("regnetx_002", "s2.b1")
    yield in_timm("regnety_002", "s2.b1", **POOLED)
    yield in_timm("vgg11", "features.10", norm="none", settings={"mlp_ratio": 1 / 32})
    yield in_timm("vgg11_bn", "features.14", settings={"mlp_ratio": 1 / 32})
    yield in_timm("repvgg_a0", "stages.1")
    yield in_timm("mobileone_s0", "stages.1")
    yield in_timm("darknet21", "stages.1")
    yield in_timm("dla34", "level3")
    yield in_timm("hrnet_w18_small", "final_layer")
    yield in_timm("hgnetv2_b0", "stages.1")
    yield in_timm("ese_vovnet19b_slim", "stages.1", **POOLED)
    yield in_timm("selecsls42", "from_seq")
    yield in_timm("inception_v3", "Mixed_5d", small=80, batch=2)
    yield in_timm("xception41", "blocks.1")
    yield in_timm("inception_next_atto", "stages.1")
    yield in_timm("mobilenetv1_100", "blocks.2")
    yield in_timm("mobilenetv2_050", "blocks.2")
    yield in_timm("mobilenetv3_small_050", "blocks.1", **POOLED)
    yield in_timm("mobilenetv4_conv_small", "blocks.1", batch=2)
    yield in_timm("efficientnet_b0", "blocks.2", **POOLED)
    yield in_timm("tf_efficientnet_b0", "blocks.2", **POOLED)
    yield in_timm("efficientnetv2_rw_t", "blocks.2")
    yield in_timm("mnasnet_small", "blocks.2")
    yield in_timm("fbnetc_100", "blocks.2")
    yield in_timm("mixnet_s", "blocks.2", **POOLED)
    yield in_timm("lcnet_050", "blocks.2")
    yield in_timm("hardcorenas_a", "blocks.2", **POOLED)
    yield in_timm("tinynet_e", "blocks.2", **POOLED)
    yield in_timm("ghostnet_050", "blocks.3", **POOLED)
    yield in_timm("repghostnet_050", "blocks.3", **POOLED)
    yield in_timm("rexnet_100", "features.4", batch=2, **POOLED)
    yield in_timm("starnet_s050", "stages.1")
    mixer = {"dim": 48, "depth": 4, "kernel_size": 7, "patch_size": 4}
    yield in_timm("convmixer_768_32", "blocks.2", where="convmixer.ConvMixer", settings=mixer)
    yield in_timm("convnext_atto", "stages.1", **LAYER)
    yield in_timm("convnextv2_atto", "stages.1", norm="response", **POOLED)
    yield in_timm("mambaout_femto", "stages.1", axes="grid", **LAYER)
    focal = {"depths": (1, 1, 1, 1), "embed_dim": 32}
    yield in_timm("focalnet_tiny_srf", "layers.1", where="focalnet.FocalNet", settings=focal, **LAYER, **POOLED)
    yield in_timm("poolformer_s12", "stages.1", norm="group")
    yield in_timm("caformer_s18", "stages.1", **LAYER)
    yield in_timm("repvit_m0_9", "stages.1", batch=2, **POOLED)
    yield in_timm("fastvit_t8", "stages.1")
    yield in_timm("efficientformerv2_s0", "stages.1", size=64, fixed=True)
    yield in_timm("efficientvit_b0", "stages.1")
    yield in_timm("coatnet_pico_rw_224", "stages.1", size=64, fixed=True, **POOLED)
    yield in_timm("mobilevit_xxs", "stages.1")
    yield in_timm("mobilevitv2_050", "stages.2", kind="attention", norm="group")
    yield in_timm("edgenext_xx_small", "stages.1", kind="attention", **LAYER)
    yield in_timm("maxvit_pico_rw_256", "stages.1", size=64, fixed=True, kind="attention", **POOLED)
    yield in_timm("tiny_vit_5m_224", "stages.1", kind="attention")
    yield in_timm("levit_conv_128s", "stages.0", size=128, fixed=True, batch=2, kind="attention")
    yield in_timm("pvt_v2_b0", "stages.1", kind="attention", **LAYER)
    yield in_timm("twins_svt_small", "blocks.1.1", **TOKENS, settings={"depths": (2, 2, 2, 2)})
    yield in_timm("coat_lite_tiny", "serial_blocks2.1", **TOKENS)
    yield in_timm("crossvit_9_240", None, size=240, small=240, kind="attention", **LAYER)
    small_windows = {"window_size": 4, "embed_dim": 24, "depths": (2, 2, 2, 2)}
    grids = {**TOKENS, "axes": "grid", "settings": small_windows}
    yield in_timm("swin_tiny_patch4_window7_224", "layers.1", **grids)
    yield in_timm("swinv2_tiny_window8_256", "layers.1", **grids)
    yield in_timm("vit_tiny_patch16_224", "blocks.1", **TOKENS, settings={"depth": 3, "patch_size": 8})
    yield in_timm("deit_tiny_distilled_patch16_224", "blocks.1", **TOKENS, settings={"depth": 3, "patch_size": 8})
    narrow = {"depth": 3, "embed_dim": 192, "num_heads": 3}
    yield in_timm("beit_base_patch16_224", "blocks.1", **TOKENS, settings=narrow)
    yield in_timm("eva02_tiny_patch14_224", "blocks.1", **TOKENS, settings={"depth": 3, "patch_size": 8})
    yield in_timm("cait_xxs24_224", "blocks.1", **TOKENS, settings={"depth": 3})
    # Two samples: with one, torch 2.13 misreads the strides of a gradient in batch_norm, in the plain model.
    yield in_timm("xcit_nano_12_p16_224", "blocks.1", batch=2, **{**TOKENS, "norm": "batch"}, settings={"depth": 3})
    mlp = {**TOKENS, "kind": "mlp", "where": "mlp_mixer.MlpMixer"}
    few = {"patch_size": 8, "num_blocks": 3, "embed_dim": 64}
    gated = {"block_layer": "SpatialGatingBlock", "mlp_layer": "GatedMlp", "mlp_ratio": 6}
    affine = {"block_layer": "ResBlock", "norm_layer": "Affine", "mlp_ratio": 4}
    yield in_timm("mixer_s32_224", "blocks.1", **mlp, settings=few)
    yield in_timm("gmlp_ti16_224", "blocks.1", **mlp, settings={**few, **gated})
    yield in_timm("resmlp_12_224", "blocks.1", **{**mlp, "norm": "none"}, settings={**few, **affine})
    recurrent = {**TOKENS, "kind": "mlp", "axes": "grid", "settings": {"layers": (1, 1, 1, 1)}}
    yield in_timm("sequencer2d_s", "stages.1", **recurrent)


def torchvision_entries():
    def of(name, module="torchvision.models", **settings):
        return lambda: getattr(foreign(module), name)(**settings)

    def classifier(name, mask, **flags):
        settings = flags.pop("settings", {})
        return images(f"{name} (torchvision)", "torchvision", of(name, num_classes=5, **settings), mask, **flags)

    yield classifier("squeezenet1_1", "features.7", norm="none")
    yield classifier("shufflenet_v2_x0_5", "stage2")
    yield classifier("googlenet", "inception3b", settings={"aux_logits": False, "init_weights": False})
    yield classifier("mobilenet_v2", "features.6", settings={"width_mult": 0.5})
    yield classifier("mobilenet_v3_small", "features.3", pooled=True)
    yield classifier("resnet18", "layer2")
    yield classifier("convnext_tiny", "features.3", norm="layer")
    segmentation = "torchvision.models.segmentation"
    settings = {"num_classes": 3, "weights_backbone": None}
    make = of("lraspp_mobilenet_v3_large", segmentation, **settings)
    yield images("lraspp_mobilenet_v3_large (torchvision)", "torchvision", make, "backbone.4", pooled=True)
    make = of("fcn_resnet50", segmentation, **settings)
    yield images("fcn_resnet50 (torchvision)", "torchvision", make, "classifier.2", size=64, small=32)
    make = of("r3d_18", "torchvision.models.video", num_classes=5)
    shapes = (1, 3, 8, 48, 48), (4, 3, 4, 32, 32)
    yield Entry("r3d_18 (torchvision)", "torchvision", make, *shapes, "layer2", "3d")


def segmentation_entries():
    def of(name, encoder, **settings):
        settings |= {"encoder_weights": None, "classes": 3}
        return lambda: getattr(foreign("segmentation_models_pytorch"), name)(encoder, **settings)

    library = "segmentation-models-pytorch"
    yield images("U-Net, ResNet-18", library, of("Unet", "resnet18"), "decoder.blocks.4")
    yield images("U-Net, MobileNetV2", library, of("Unet", "mobilenet_v2"), "decoder.blocks.4")
    fpn = of("FPN", "resnet18", encoder_depth=4)
    yield images("FPN, ResNet-18", library, fpn, "decoder.merge", size=64, norm="group")
    # With the usual rates windows would be a hundred times as large as these small images.
    deeplab = of("DeepLabV3Plus", "resnet18", decoder_atrous_rates=(1, 2, 3))
    yield images("DeepLabV3+, ResNet-18", library, deeplab, "decoder.block2", batch=2, **POOLED)


def monai_entries():
    def of(name, **settings):
        return lambda: getattr(foreign("monai.networks.nets"), name)(**settings)

    def unet(dims, norm):
        channels = {"in_channels": 1, "out_channels": 2, "channels": (8, 16, 32), "strides": (2, 2)}
        return of("UNet", spatial_dims=dims, num_res_units=1, norm=norm, **channels)

    def densenet(dims):
        settings = {"init_features": 16, "growth_rate": 8, "block_config": (2, 3, 2), "in_channels": 1}
        return of("DenseNet", spatial_dims=dims, out_channels=3, **settings)

    plane, small_plane = (1, 1, 96, 96), (8, 1, 32, 32)
    cube, small_cube = (1, 1, 32, 32, 32), (6, 1, 16, 16, 16)
    yield Entry("U-Net 2-D, BatchNorm", "monai", unet(2, "batch"), plane, small_plane, "model.2.0")
    yield Entry("U-Net 2-D", "monai", unet(2, "instance"), plane, small_plane, "model.2.0", norm="instance")
    yield Entry("U-Net 3-D, BatchNorm", "monai", unet(3, "batch"), cube, small_cube, "model.2.0", "3d")
    yield Entry("U-Net 3-D", "monai", unet(3, "instance"), cube, small_cube, "model.2.0", "3d", norm="instance")
    yield Entry("DenseNet 2-D", "monai", densenet(2), plane, small_plane, "features.denseblock2")
    yield Entry("DenseNet 3-D", "monai", densenet(3), cube, small_cube, "features.denseblock2", "3d")


def transformers_entries():
    def of(name, config, **settings):
        def make():
            transformers = importlib.import_module("transformers")
            return getattr(transformers, name)(getattr(transformers, config)(**settings))

        return make

    def text(name, make, mask, **flags):
        flags = {"axes": "tokens", "kind": "attention", "norm": "layer", **flags}
        return Entry(name, "transformers", make, (2, 24), (8, 12), mask, words=50, **flags)

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    words = {"vocab_size": 50, "pad_token_id": 0}
    yield text("BERT", of("BertModel", "BertConfig", **sizes, **words), "encoder.layer.1")
    settings = {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 64}
    yield text("DistilBERT", of("DistilBertModel", "DistilBertConfig", **settings, **words), "transformer.layer.1")
    settings = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 50, "use_cache": False}
    yield text("GPT-2", of("GPT2Model", "GPT2Config", **settings), "h.1")
    settings = {**sizes, "num_key_value_heads": 1, "use_cache": False}
    yield text("Llama", of("LlamaModel", "LlamaConfig", **settings, **words), "layers.1")
    settings = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_heads": 2}
    yield text("T5 encoder", of("T5EncoderModel", "T5Config", **settings, **words), "encoder.block.1.layer.1")
    flags = {"axes": "tokens", "kind": "attention", "norm": "layer"}
    make = of("ViTModel", "ViTConfig", **sizes, image_size=64, patch_size=8)
    yield images("ViT", "transformers", make, "layers.1", size=64, **flags)
    convolutions = {"conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2)}
    settings = {**sizes, **convolutions, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    shapes = (2, 2000), (8, 600)
    make = of("Wav2Vec2ForCTC", "Wav2Vec2Config", **settings, vocab_size=10)
    yield Entry("Wav2Vec2", "transformers", make, *shapes, "wav2vec2.encoder.layers.1", **{**flags, "norm": "group"})
    make = of("Wav2Vec2Model", "Wav2Vec2Config", **settings, feat_extract_norm="layer")
    behind = "feature_extractor.conv_layers.2"
    yield Entry("Wav2Vec2, convolutions", "transformers", make, *shapes, behind, "1d", norm="layer")
    settings = {"embedding_size": 8, "hidden_sizes": (8, 16, 24), "depths": (1, 1, 1), "layer_type": "basic"}
    yield images("ResNet", "transformers", of("ResNetModel", "ResNetConfig", **settings), "encoder.stages.1")


def own_entries():
    signal, short = (1, 1, 2000), (8, 1, 300)
    yield Entry("ResNet1d", "this repository", lambda: ResNet(1, 1), signal, short, "layer2", "1d")
    shapes = (1, 4, 400), (8, 4, 60)
    yield Entry("TCN", "this repository", TCN, *shapes, "network", "1d", norm="none")
    shapes = (1, 1, 600), (8, 1, 80)
    yield Entry("WaveNet", "this repository", WaveNet, *shapes, "post", "1d", norm="none")
    shapes = (1, 2, 32, 32, 32), (6, 2, 16, 16, 16)
    yield Entry("ResNet3d", "this repository", lambda: ResNet(3, 2), *shapes, "layer2", "3d")
    yield images("Discriminator", "this repository", Discriminator, "blocks", small=32, norm="none", couples=True)


ENTRIES = {
    entry.name: entry
    for entries in (
        timm_entries,
        torchvision_entries,
        segmentation_entries,
        monai_entries,
        transformers_entries,
        own_entries,
    )
    for entry in entries()
}
QUICK = (  # one of each sort
    *("resnet18", "seresnet18", "efficientnet_b0", "convnext_atto", "nf_resnet26", "vit_tiny_patch16_224"),
    *("U-Net, ResNet-18", "U-Net 3-D, BatchNorm", "BERT", "Wav2Vec2, convolutions", "TCN", "Discriminator"),
)
