"""Inputs that must be refused, each with an error that names the argument, its value and what is allowed."""

import math

import pytest
import torch
from torch import nn

from backdrop import Backdrop, Backdrop1d, Backdrop2d, Backdrop3d, effective_batch_size
from backdrop.distributed import all_gather
from backdrop.functional import backdrop, draw_mask, draw_weight, mask_gradient
from backdrop.losses import (
    AveragePrecisionLoss,
    ClassDistanceLoss,
    NDCGLoss,
    PartialAUCLoss,
    RankStatisticLoss,
    average_precision_loss,
    class_distance_loss,
    concordance_loss,
    ndcg_loss,
    partial_auc_loss,
    rank_statistic_loss,
    soft_f_beta_loss,
    soft_rank,
    spearman_loss,
    squared_hinge_auc_loss,
)
from backdrop.schedules import ConstantP, CosineP, LambdaP, LinearP, StepP, VarianceBudget
from backdrop.textures import Matern, SquaredExponential, Texture, TextureDataset, patchwork_length, plot

X = torch.ones(4, 3, 8, 8, requires_grad=True)
META = torch.device("meta")
S, Y = torch.linspace(0, 1, 4), torch.tensor([0, 1, 0, 1])
SE = SquaredExponential(3)
SAVED = LinearP(Backdrop(), steps=2).state_dict()
LINEAR = nn.Sequential(nn.Linear(2, 1), Backdrop())

REFUSED = [
    # p
    (lambda: backdrop(X, 1.0), ValueError, ["p has", "[0, 1)", "1.0"]),
    (lambda: backdrop(X, -0.1, training=False), ValueError, ["p has", "[0, 1)", "-0.1"]),
    (lambda: backdrop(X, math.nan), ValueError, ["p has", "[0, 1)", "nan"]),
    (lambda: backdrop(X, math.inf), ValueError, ["p has", "[0, 1)", "inf"]),
    (lambda: backdrop(X, torch.tensor(1.5)), ValueError, ["p has", "[0, 1)", "1.5"]),
    (lambda: backdrop(X, torch.tensor(math.nan)), ValueError, ["p has", "nan"]),
    (lambda: backdrop(X, torch.tensor([0.5])), TypeError, ["p has", "0-d", "(1,)"]),
    (lambda: backdrop(X, torch.tensor(0)), TypeError, ["p has", "floating-point", "int64"]),
    (lambda: backdrop(X, torch.tensor(0.5, requires_grad=True)), TypeError, ["p has", "gradient"]),
    (lambda: backdrop(X, torch.tensor(0.5, device=META)), ValueError, ["p has", "device", "cpu", "meta"]),
    (lambda: backdrop(X, "0.5"), TypeError, ["p has", "number", "'0.5'", "str"]),
    (lambda: backdrop(X, None), TypeError, ["p has", "number", "None"]),
    (lambda: backdrop(X, True), TypeError, ["p has", "number", "True"]),
    (lambda: backdrop(X, 0.5j), TypeError, ["p has", "number", "0.5j"]),
    (lambda: Backdrop(1.5), ValueError, ["p has", "[0, 1)", "1.5"]),
    (lambda: Backdrop2d(nn.Parameter(torch.tensor(0.5))), TypeError, ["p has", "gradient"]),
    (lambda: setattr(Backdrop(), "p", 2), ValueError, ["p has", "[0, 1)", "2"]),
    (lambda: draw_mask((3,), 7), ValueError, ["p has", "[0, 1)", "7"]),
    (lambda: effective_batch_size(10, 1.0), ValueError, ["p has", "[0, 1)", "1.0"]),
    # dims
    (lambda: backdrop(X, 0.5, 4), ValueError, ["dims", "[-4, 3]", "dims=4"]),
    (lambda: backdrop(X, 0.5, (0, -5)), ValueError, ["dims", "[-4, 3]", "(0, -5)"]),
    (lambda: backdrop(X, 0.5, (1, -3)), ValueError, ["dims", "once", "(1, -3)"]),
    (lambda: backdrop(X, 0.5, ()), ValueError, ["dims", "at least one", "()"]),
    (lambda: backdrop(X, 0.5, 1.0), TypeError, ["dims", "integer", "1.0"]),
    (lambda: backdrop(X, 0.5, "01"), TypeError, ["dims", "integer", "'01'"]),
    (lambda: backdrop(X, 0.5, (0, True)), TypeError, ["dims", "integer", "(0, True)"]),
    (lambda: backdrop(X.sum(), 0.5), ValueError, ["dims", "0-d"]),
    (lambda: Backdrop(0.5, (2, 2)), ValueError, ["dims", "once", "(2, 2)"]),
    (lambda: Backdrop(0.5, None), TypeError, ["dims", "integer", "None"]),
    # patch
    (lambda: backdrop(X, 0.5, (0, 2), patch=0), ValueError, ["patch", "at least 1", "patch=0"]),
    (lambda: backdrop(X, 0.5, (0, 2), patch=(-2,)), ValueError, ["patch", "at least 1", "(-2,)"]),
    (lambda: backdrop(X, 0.5, (0, 2), patch=1.5), TypeError, ["patch", "integer", "1.5"]),
    (lambda: backdrop(X, 0.5, (0, 2), patch=(2, 2)), ValueError, ["patch", "1 axes", "(0, 2)", "(2, 2)"]),
    (lambda: Backdrop2d(0.5, patch=(2,)), ValueError, ["patch", "2 axes", "(2,)"]),
    (lambda: Backdrop(0.5, patch=0), ValueError, ["patch", "at least 1", "patch=0"]),
    # scale
    (lambda: backdrop(X, 0.5, scale="counts"), ValueError, ["scale", "'count'", "'counts'"]),
    (lambda: Backdrop(0.5, scale=2), ValueError, ["scale", "'count'", "2"]),
    (lambda: draw_weight((3,), 0.5, scale="mean"), ValueError, ["scale", "'count'", "'mean'"]),
    # x
    (lambda: backdrop(torch.arange(3), 0.5), TypeError, ["x has", "floating-point", "int64"]),
    (lambda: backdrop(torch.ones(3, dtype=torch.bool), 0.5, training=False), TypeError, ["x has", "bool"]),
    (lambda: backdrop([1.0], 0.5), TypeError, ["x has", "tensor", "list"]),
    (lambda: mask_gradient(torch.arange(3), torch.ones(3)), TypeError, ["x has", "floating-point", "int64"]),
    (lambda: Backdrop2d()(3), TypeError, ["x has", "tensor", "int"]),
    (lambda: Backdrop1d()(X), ValueError, ["Backdrop1d", "(N, C, L)", "(4, 3, 8, 8)"]),
    (lambda: Backdrop2d().eval()(X[0]), ValueError, ["Backdrop2d", "(N, C, H, W)", "(3, 8, 8)"]),
    (lambda: Backdrop3d()(X), ValueError, ["Backdrop3d", "(N, C, D, H, W)", "(4, 3, 8, 8)"]),
    (lambda: draw_mask((3, -1), 0.5), ValueError, ["shape", "(3, -1)"]),
    (lambda: draw_mask(3, 0.5), ValueError, ["shape", "3"]),
    (lambda: draw_mask((3, 2.5), 0.5), TypeError, ["shape", "integer", "(3, 2.5)"]),
    # weight
    (lambda: mask_gradient(X, torch.ones(5)), ValueError, ["weight", "broadcast", "(5,)", "(4, 3, 8, 8)"]),
    (lambda: mask_gradient(X[:, :1], torch.ones(4, 3, 8, 8)), ValueError, ["weight", "enlarging", "(4, 1, 8, 8)"]),
    (lambda: mask_gradient(X[0], torch.ones(4, 3, 8, 8)), ValueError, ["weight", "(4, 3, 8, 8)", "(3, 8, 8)"]),
    (lambda: mask_gradient(X, torch.ones(8, dtype=torch.complex64)), TypeError, ["weight", "real", "complex64"]),
    (lambda: mask_gradient(X, 0.5), TypeError, ["weight", "tensor", "float"]),
    (lambda: mask_gradient(X, torch.tensor(1.0, device=META)), ValueError, ["weight", "device", "cpu", "meta"]),
    (lambda: mask_gradient(X, torch.ones(8, device=META)), ValueError, ["weight", "device", "cpu", "meta"]),
    # generator
    (lambda: backdrop(X, 0.5, generator=0), TypeError, ["generator", "torch.Generator", "int"]),
    (lambda: draw_mask((3,), 0.5, generator=0), TypeError, ["generator", "torch.Generator", "int"]),
    (lambda: Backdrop(generator=0), TypeError, ["generator", "torch.Generator", "int"]),
    (
        lambda: draw_mask((3,), 0.5, generator=torch.Generator(), device="cuda:1"),
        ValueError,
        ["generator", "cuda:1, but got one on cpu", "torch.Generator(device='cuda:1')"],
    ),
    # schedules
    (lambda: ConstantP(nn.ReLU(), 0.5), ValueError, ["target", "at least one", "none"]),
    (lambda: ConstantP([nn.ReLU()], 0.5), TypeError, ["target", "Backdrop layers", "ReLU"]),
    (lambda: ConstantP(Backdrop(), 1.0), ValueError, ["p has", "[0, 1)", "1.0"]),
    (lambda: LinearP(Backdrop(), end=1.0, steps=3), ValueError, ["p has", "[0, 1)", "1.0"]),
    (lambda: LinearP(Backdrop(), steps=0), ValueError, ["steps", "at least 1", "0"]),
    (lambda: CosineP(Backdrop(), steps=2.5), ValueError, ["steps", "integer", "2.5"]),
    (lambda: StepP(Backdrop(), {-1: 0.5}), ValueError, ["milestones", "at least 0", "-1"]),
    (lambda: StepP(Backdrop(), {1: 1.5}), ValueError, ["p has", "[0, 1)", "1.5"]),
    (lambda: StepP(Backdrop(), 3), TypeError, ["milestones", "map", "int"]),
    (lambda: ConstantP(3, 0.5), TypeError, ["target", "Backdrop layers", "int"]),
    (lambda: LambdaP(Backdrop(), 0.5), TypeError, ["function", "callable", "float"]),
    (lambda: LambdaP(Backdrop(), lambda step: step + 1), ValueError, ["p has", "[0, 1)", "1"]),
    (lambda: VarianceBudget(LINEAR, share=0.0), ValueError, ["share", "0.0"]),
    (lambda: VarianceBudget(LINEAR, share=0.1, memory=1), ValueError, ["memory", "at least 10", "1"]),
    (lambda: VarianceBudget(LINEAR, share=0.1, largest=1.0), ValueError, ["p has", "[0, 1)", "1.0"]),
    (lambda: VarianceBudget([LINEAR[1]], share=0.1), ValueError, ["parameters", "model.parameters()"]),
    (lambda: VarianceBudget(Backdrop(), share=0.1), ValueError, ["parameters", "requires a gradient", "none"]),
    (lambda: VarianceBudget(LINEAR, share=0.1).step(), RuntimeError, ["no gradients", "before zero_grad()"]),
    # what a schedule saved
    *(
        (lambda change=change: LinearP(Backdrop(), steps=2).load_state_dict(SAVED | change), error, parts)
        for change, error, parts in [
            ({"own_p": 3}, ValueError, ["state_dict", "1 layers", "3"]),
            ({"own_p": [0.5, 0.5]}, ValueError, ["state_dict", "1 layers", "2"]),
            ({"last_step": None}, TypeError, ["last_step", "integer", "None"]),
            ({"last_step": -1}, ValueError, ["last_step", "at least 0", "-1"]),
            ({"steps": 0}, ValueError, ["state_dict", "LinearP", "zero"]),
            ({"start": "x"}, ValueError, ["state_dict", "LinearP", "str"]),
            ({"end": 7.0, "last_step": 2}, ValueError, ["state_dict", "[0, 1)", "7.0"]),
        ]
    ),
    # group
    (lambda: Backdrop(0.5, group="all"), TypeError, ["group has", "'world'", "'all'"]),
    (lambda: Backdrop2d(0.5, group=3), TypeError, ["group has", "ProcessGroup", "int", "not in"]),
    (lambda: all_gather(S, group=[0, 1]), TypeError, ["group has", "ProcessGroup", "list"]),
    (lambda: all_gather(S[0]), ValueError, ["x has", "axis", "0-d"]),
    (lambda: all_gather([1.0]), TypeError, ["x has", "tensor", "list"]),
    # losses
    (lambda: rank_statistic_loss([1.0], Y), TypeError, ["scores has", "tensor", "list"]),
    (lambda: rank_statistic_loss(S, [0, 1]), TypeError, ["labels has", "tensor", "list"]),
    (lambda: rank_statistic_loss(Y, Y), TypeError, ["scores has", "floating-point", "int64"]),
    (lambda: rank_statistic_loss(X, Y), ValueError, ["scores has", "(n, classes)", "(4, 3, 8, 8)"]),
    (lambda: rank_statistic_loss(S, Y[:3]), ValueError, ["labels has", "(4,) or (4, 1)", "(3,)"]),
    (lambda: rank_statistic_loss(S, Y.to(META)), ValueError, ["labels has", "device", "cpu", "meta"]),
    (lambda: rank_statistic_loss(S, Y + 1), ValueError, ["labels has", "0 and 1", "[1, 2]"]),
    (lambda: rank_statistic_loss(S, Y - 0.5), ValueError, ["labels has", "0 and 1", "[-0.5, 0.5]"]),
    (lambda: rank_statistic_loss(torch.ones(4, 3), Y * 3), ValueError, ["labels has", "0 to 2", "[0, 3]"]),
    (lambda: rank_statistic_loss(S, Y, temperature=0), ValueError, ["temperature has", "1e-30", "0"]),
    (lambda: rank_statistic_loss(S, Y, temperature="1"), TypeError, ["temperature has", "number", "'1'"]),
    (lambda: rank_statistic_loss(S, Y, weight=[1.0]), TypeError, ["weight has", "tensor", "list"]),
    (lambda: rank_statistic_loss(S, Y, weight=torch.ones(3)), ValueError, ["weight has", "(4,)", "(3,)"]),
    (lambda: rank_statistic_loss(S, Y, weight=-torch.ones(4)), ValueError, ["weight has", "at least 0"]),
    (lambda: rank_statistic_loss(S, Y, weight=torch.full((4,), math.inf)), ValueError, ["weight has", "finite"]),
    (lambda: rank_statistic_loss(S, Y, single_class="skip"), ValueError, ["single_class has", "'zero'", "'skip'"]),
    (lambda: rank_statistic_loss(S, Y, group="all"), TypeError, ["group has", "'world'", "'all'"]),
    (lambda: rank_statistic_loss(S, Y * 0), ValueError, ["4 samples", "one class", "single_class='zero'"]),
    (lambda: squared_hinge_auc_loss(S, Y, margin=-1), ValueError, ["margin has", "at least 0", "-1"]),
    (lambda: squared_hinge_auc_loss(S, Y, margin=math.nan), ValueError, ["margin has", "finite", "nan"]),
    (lambda: class_distance_loss(X, Y.float(), distance=1), ValueError, ["labels has", "integer", "float32"]),
    (lambda: class_distance_loss(X, Y[:2], distance=1), ValueError, ["labels has", "(2,)", "(4, 3, 8, 8)"]),
    (lambda: class_distance_loss(S[0], Y[0], distance=1), ValueError, ["labels has", "per sample", "()"]),
    (lambda: class_distance_loss(X, Y, distance=math.inf), ValueError, ["distance has", "finite", "inf"]),
    (lambda: class_distance_loss(X, Y, distance=1, weight=-S.abs() - 1), ValueError, ["weight has", "at least 0"]),
    (lambda: soft_f_beta_loss(S + 1, Y), ValueError, ["probabilities has", "[0, 1]", "sigmoid"]),
    (lambda: soft_f_beta_loss(S, Y, beta=0), ValueError, ["beta has", "1e-06", "0"]),
    (lambda: soft_rank([1.0], temperature=1), TypeError, ["scores has", "tensor", "list"]),
    (lambda: soft_rank(X, temperature=1), ValueError, ["scores has", "(n, columns)", "(4, 3, 8, 8)"]),
    (lambda: soft_rank(S, temperature=0), ValueError, ["temperature has", "1e-30", "0"]),
    (lambda: soft_rank(Y, temperature=1), TypeError, ["scores has", "floating-point", "int64"]),
    (lambda: soft_rank(S, temperature=1, weight=-S - 1), ValueError, ["weight has", "at least 0"]),
    (lambda: average_precision_loss(S, Y + 1, temperature=1), ValueError, ["labels has", "0 and 1", "[1, 2]"]),
    (lambda: average_precision_loss(S, Y, temperature=math.nan), ValueError, ["temperature has", "nan"]),
    (lambda: average_precision_loss(S, Y * 0, temperature=1), ValueError, ["one class", "single_class='zero'"]),
    (lambda: AveragePrecisionLoss("1"), TypeError, ["temperature has", "number", "'1'"]),
    (lambda: partial_auc_loss(S, Y, max_fpr=0, temperature=1), ValueError, ["max_fpr has", "0"]),
    (lambda: partial_auc_loss(S, Y, max_fpr=1.1, temperature=1), ValueError, ["max_fpr has", "(0, 1]", "1.1"]),
    (lambda: PartialAUCLoss(2, 1), ValueError, ["max_fpr has", "(0, 1]", "2"]),
    (lambda: ndcg_loss(S, Y[:3], temperature=1), ValueError, ["relevance the same", "(4,)", "(3,)"]),
    (lambda: ndcg_loss(S, Y - 1, temperature=1), ValueError, ["relevance has", "at least 0"]),
    (lambda: ndcg_loss(S, S * math.inf, temperature=1), ValueError, ["relevance has", "finite"]),
    (lambda: ndcg_loss(S, [1], temperature=1), TypeError, ["relevance has", "tensor", "list"]),
    (lambda: ndcg_loss(S, Y, temperature=1, gains="log"), ValueError, ["gains has", "'linear'", "'log'"]),
    (lambda: ndcg_loss(S, Y, temperature=1, weight=-S - 1), ValueError, ["weight has", "at least 0"]),
    (lambda: ndcg_loss(S, Y * 0, temperature=1), ValueError, ["no relevant item", "single_class='zero'"]),
    (lambda: NDCGLoss(1, gains=None), ValueError, ["gains has", "None"]),
    (lambda: spearman_loss(S, S[:3], temperature=1), ValueError, ["b the same", "(4,)", "(3,)"]),
    (lambda: spearman_loss(S, "b", temperature=1), TypeError, ["b has", "tensor", "str"]),
    (lambda: spearman_loss(S, S.to(META), temperature=1), ValueError, ["b has", "device", "meta"]),
    (lambda: spearman_loss(S, S * 0, temperature=1), ValueError, ["same value", "single_class='zero'"]),
    (lambda: concordance_loss(S, Y, Y[:2], temperature=1), ValueError, ["events have", "(4,)", "(2,)"]),
    (lambda: concordance_loss(S, Y, Y + 1, temperature=1), ValueError, ["events has", "0 and 1"]),
    (lambda: concordance_loss(S, S * math.nan, Y, temperature=1), ValueError, ["times has"]),
    (lambda: concordance_loss(S, S, Y * 0, temperature=1), ValueError, ["no two samples", "single_class='zero'"]),
    (lambda: concordance_loss(S, S, "e", temperature=1), TypeError, ["events has", "tensor", "str"]),
    (lambda: RankStatisticLoss(-1), ValueError, ["temperature has", "-1"]),
    (lambda: ClassDistanceLoss(1, single_class=0), ValueError, ["single_class has", "'error'", "0"]),
    # textures
    (lambda: SquaredExponential(0), ValueError, ["length has", "positive", "0"]),
    (lambda: SquaredExponential(-2.0), ValueError, ["length has", "positive", "-2.0"]),
    (lambda: SquaredExponential(math.nan), ValueError, ["length has", "finite", "nan"]),
    (lambda: SquaredExponential(math.inf), ValueError, ["length has", "finite", "inf"]),
    (lambda: SquaredExponential("3"), TypeError, ["length has", "number", "'3'"]),
    (lambda: SquaredExponential(True), TypeError, ["length has", "number", "True"]),
    (lambda: Matern(0, 1.5), ValueError, ["length has", "positive", "0"]),
    (lambda: Matern(3, math.nan), ValueError, ["nu has", "finite", "nan"]),
    (lambda: Matern(3, 0.01), ValueError, ["nu has", "[0.05, 10000]", "0.01"]),
    (lambda: Matern(3, 1e6), ValueError, ["nu has", "SquaredExponential", "1000000.0"]),
    (lambda: patchwork_length(-1), ValueError, ["length has", "positive", "-1"]),
    (lambda: Texture([]), TypeError, ["kernels has", "at least one", "[]"]),
    (lambda: Texture([3.0]), TypeError, ["kernels has", "SquaredExponential", "3.0"]),
    (lambda: Texture([SE, SE], (1,)), ValueError, ["weights has", "2 kernels", "(1,)"]),
    (lambda: Texture(SE, (math.nan,)), ValueError, ["weights have", "finite", "nan"]),
    (lambda: Texture(SE, 2.0), TypeError, ["weights has", "sequence", "2.0"]),
    (lambda: Texture(SE, "1"), TypeError, ["weights has", "sequence", "'1'"]),
    (lambda: Texture(SE, combine="mix"), ValueError, ["combine has", "'convolve'", "'mix'"]),
    (lambda: Texture.grid([]), ValueError, ["groups has", "one or more", "[]"]),
    (lambda: Texture.grid([(1, 2), ()]), ValueError, ["groups has", "one or more lengths", "()"]),
    (lambda: Texture(SE).sample(1, 1, seed=0), ValueError, ["size has", "at least 2", "1"]),
    (lambda: Texture(SE).sample(1, (8, 1), seed=0), ValueError, ["size has", "at least 2", "(8, 1)"]),
    (lambda: Texture(SE).sample(1, (8,) * 4, seed=0), ValueError, ["size has", "one to three", "(8, 8, 8, 8)"]),
    (lambda: Texture(SE).sample(1, (), seed=0), ValueError, ["size has", "one to three", "()"]),
    (lambda: Texture(SE).sample(1, 8.0, seed=0), TypeError, ["size has", "integer", "8.0"]),
    (lambda: Texture(SE).sample(-1, 8, seed=0), ValueError, ["n has", "at least 0", "-1"]),
    (lambda: Texture(SE).sample(1.5, 8, seed=0), TypeError, ["n has", "integer", "1.5"]),
    (lambda: Texture(SE).sample(1, 8, seed=0, first=-1), ValueError, ["first has", "at least 0", "-1"]),
    (lambda: Texture(SE).sample(1, 8, seed=0.5), TypeError, ["seed has", "integer", "0.5"]),
    (lambda: Texture(SE).sample(1, 8, seed=None), TypeError, ["seed has", "integer", "None"]),
    (lambda: Texture(SE).sample(1, 8, seed=0, dtype=torch.float16), ValueError, ["dtype has", "float32", "float16"]),
    (lambda: Texture(SE).sample(1, 8, seed=0, device="meta"), ValueError, ["device has", "CPU or a CUDA", "meta"]),
    (lambda: Texture(SE).sample(1, 10**7, seed=0), ValueError, ["1 sample of 10000000 x 10000000", "GB free"]),
    (lambda: Texture(SE).sample(10**9, 1024, seed=0), ValueError, ["1000000000 samples", "GB free", "fewer"]),
    (lambda: Texture(SquaredExponential(801)).sample(1, 8, seed=0), ValueError, ["lengths have", "100 times", "801"]),
    (lambda: Texture(SquaredExponential(1e18), normalise=False).sample(1, 8, seed=0), ValueError, ["torus", "GB free"]),
    (lambda: TextureDataset([], 1, 8, 0), TypeError, ["classes has", "Texture", "[]"]),
    (lambda: TextureDataset([SE], 1, 8, 0), TypeError, ["classes has", "Texture", "SquaredExponential"]),
    (lambda: TextureDataset([Texture(SE)], 0, 8, 0), ValueError, ["per_class has", "at least 1", "0"]),
    (lambda: TextureDataset([Texture(SE)], 1, 8, 0, crop=3), ValueError, ["crop has", "divide", "(8, 8)", "3"]),
    (lambda: TextureDataset([Texture(SE)], 1, 8, 0, crop=0), ValueError, ["crop has", "divide", "0"]),
    (lambda: TextureDataset([Texture(SE)], 1, 8, 0, crop=(4,)), ValueError, ["crop has", "every axis", "(4,)"]),
    (lambda: TextureDataset([Texture(SE)], 1, 8, 0, split=1), TypeError, ["split has", "'train'", "1"]),
    (lambda: plot([]), ValueError, ["textures has", "number of scales", "[]"]),
    (lambda: plot([Texture(SE), Texture([SE, SE])]), ValueError, ["textures has", "number of scales"]),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused_with_a_clear_error(call, error, words):
    state = torch.get_rng_state()
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_of_other_libraries_are_taken():
    numpy = pytest.importorskip("numpy")
    for p in (numpy.float32(0.5), numpy.float64(0.5), numpy.array(0.5)[()]):
        assert Backdrop(p).p == 0.5
    mask = draw_mask((numpy.int64(4), 6), 0.5, (numpy.int64(0), 1), patch=numpy.int64(2))
    assert mask.shape == (4, 6)
