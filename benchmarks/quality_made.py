"""Tasks of quality.py on data that are made: a table, pairs, textures, bags."""

import torch
from torch import nn
from torch.nn import functional as F

from backdrop import Backdrop, Backdrop2d
from backdrop.losses import contrastive_loss, cox_loss
from backdrop.textures import SquaredExponential, Texture
from quality_base import Pair, Task, errors, generator_of
from quality_photographs import Pets


class Rows(Pets):
    """A made table: interactions of a few columns of 50 say how likely a row is one of the 1%."""

    name, seconds = "ROC AUC, table of 200,000 x 50, 1% positives", 6.0
    columns, counts = 50, (200_000, 50_000, 50_000)

    def __init__(self, seed, data):
        parts = zip(self.counts, ((seed, 1), (seed, 2), (7,)), strict=True)
        self.training, self.validation, self.test = (self.made(n, generator_of(*key)) for n, key in parts)

    def made(self, count, generator):
        x = torch.randn(count, self.columns, generator=generator)
        signal = 1.5 * torch.sin(2 * x[:, 0]) * x[:, 1] + x[:, 2] * x[:, 3] + (x[:, 4] - x[:, 5] * x[:, 6]).relu()
        signal += 0.7 * x[:, 7] + x[:, 8].abs() * (x[:, 9] > 0) - 0.5 * x[:, 10] * x[:, 11] * x[:, 12]
        noise = torch.rand(count, generator=generator).logit(eps=1e-6)
        return x, ((1.5 * signal + noise) > 11.2).long()

    def body(self):
        return nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def also(self, model):
        order = self.shown(model, self.test).flatten().argsort(descending=True)
        hits = self.test[1][order].double()
        precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
        return {"average precision, %": 100 * (precision * hits).sum().item() / hits.sum().item()}


class Contrast(Task):
    """Two made views of the same 8 hidden numbers; each shall be nearest to its own among all."""

    name, said, inputs = "contrastive pairs", "not found among 1,000, %", 2
    ways = ("whole", "small", "medium", "uniform", "informed", "budget")
    sizes, count = (64, 512), 2048

    def __init__(self, seed, data):
        fixed = generator_of(11)
        self.maps = [torch.randn(8, 64, generator=fixed) / 2 for _ in range(2)]
        parts = [(self.count, (seed, 1)), (1000, (seed, 2)), (1000, (3,))]
        self.training, self.validation, self.test = (self.made(n, generator_of(*key)) for n, key in parts)

    def made(self, count, generator):
        hidden = torch.randn(count, 8, generator=generator)
        views = (torch.sin(hidden @ one) for one in self.maps)
        return tuple(view + 0.4 * torch.randn(count, 64, generator=generator) for view in views)

    def body(self):
        def encoder():
            return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))

        return Pair(encoder(), encoder())

    def loss(self, outputs):
        return contrastive_loss(*(F.normalize(x, dim=1) for x in outputs), temperature=0.1)

    def measure(self, model, part):
        with torch.no_grad():
            a, b = (F.normalize(x, dim=1) for x in model(*part))
            return errors(a @ b.T, torch.arange(len(a)))


class Survival(Task):
    """Cohorts of example 12: the larger the share of fine texture, the sooner the event. One in five has one."""

    name, said, side, crop = "survival, images of textures", "1 - concordance, %", 64, 24
    ways = ("whole", "small", "medium", "balanced", "subsample", "crops", "uniform", "informed", "budget")
    sizes, kept = (16, 64), 0.1

    def __init__(self, seed, data):
        made = [cohort(count, key, self.side) for count, key in ((256, 2 * seed), (256, 2 * seed + 1), (768, 10**6))]
        self.training, self.validation, self.test = made

    def prepare(self, part, generator, crop=False):
        return ((cropped(part[0], self.crop, generator) if crop else part[0]),), part[1:]

    def body(self):
        return nn.Sequential(*looking(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1))

    def loss(self, log_hazards, times, events):
        return cox_loss(log_hazards, times, events, single_class="zero")

    def measure(self, model, part):
        log_hazards, (times, events) = self.shown(model, part).flatten(), part[1:]
        known = (events[:, None] & (times[:, None] < times)).nonzero(as_tuple=True)
        apart = log_hazards[known[0]] - log_hazards[known[1]]
        return 100 * ((apart < 0).double() + 0.5 * (apart == 0).double()).mean().item()


def looking(first, second):
    """Three convolutions, that look at 17 pixels a side and halve the image twice."""
    return (
        *(nn.Conv2d(1, first, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(first, second, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(second, second, 3, padding=1), nn.ReLU()),
    )


def cohort(number, seed, side):
    generator = generator_of(seed)
    fields = [
        Texture([SquaredExponential(length)]).sample(number, (side, side), seed=3 * seed + i)
        for i, length in enumerate((3.0, 1.8, 8.0))
    ]
    coarse, fine, where = fields
    share = torch.rand(number, generator=generator)
    bounds = where.flatten(1).sort(1).values.gather(1, (share * (side**2 - 1)).long()[:, None])[:, :, None]
    log_hazards = 4 * (share - 0.5)
    due = -torch.rand(number, generator=generator).log() / log_hazards.exp()
    censored = -torch.rand(number, generator=generator).log() / 5
    return torch.where(where < bounds, fine, coarse)[:, None], torch.minimum(due, censored), due <= censored


def cropped(images, side, generator):
    """A random part of each."""
    starts = torch.stack([torch.randint(n - side + 1, (len(images),), generator=generator) for n in images.shape[2:]])
    i, j = starts[:, :, None] + torch.arange(side)
    return images[torch.arange(len(images))[:, None, None], :, i[:, :, None], j[:, None, :]].movedim(3, 1)


class Textures(Task):
    """Nine kinds of textures with two scales, three images of each for training; flipped and turned in every way."""

    name, said, side, crop = "textures, few large images", "errors, %", 192, 64
    ways = ("whole", "small", "medium", "crops", "uniform", "informed", "budget")
    sizes, kept, augmented, seconds = (3, 9), 0.02, True, 6.0

    def __init__(self, seed, data):
        counts = ((3, 3 * seed), (5, 3 * seed + 1), (20, 10**6))
        self.training, self.validation, self.test = (self.made(count, key) for count, key in counts)

    def made(self, count, seed):
        kinds = Texture.grid([(2.0, 2.4, 2.9), (7.0, 9.0, 11.5)], weights=(1.0, 1.0))
        images = [kind.sample(count, (self.side,) * 2, seed=50 * seed + i) for i, kind in enumerate(kinds)]
        return torch.cat(images)[:, None], torch.arange(len(kinds)).repeat_interleave(count)

    def prepare(self, part, generator, crop=False):
        x = cropped(part[0], self.crop, generator) if crop else part[0]
        way = int(torch.randint(8, (), generator=generator)) if self.augmented else 0
        x = x.flip(2) if way & 1 else x
        x = x.flip(3) if way & 2 else x
        return ((x.transpose(2, 3) if way & 4 else x).contiguous(),), part[1:]

    def body(self):
        return nn.Sequential(*looking(12, 24))

    def head(self):
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 9))

    def mask(self, choose, p):
        return Backdrop2d(p, exact=True, choose=choose)

    def loss(self, scores, labels):
        return F.cross_entropy(scores, labels)

    def measure(self, model, part):
        return errors(torch.cat([self.shown(model, (x,)) for x in part[0].split(20)]), part[1])


class Bags(Task):
    """Bags of 200 instances: is the share of one kind among them above a half, told from the mean of their features?"""

    name, said, number, size = "bags of 200 instances", "errors, %", 300, 200
    ways = ("whole", "small", "medium", "crops", "uniform", "informed", "budget")
    sizes, kept, seconds = (10, 60), 0.06, 3.0

    def __init__(self, seed, data):
        keys = ((self.number, (seed, 1)), (300, (seed, 2)), (1000, (3,)))
        self.training, self.validation, self.test = (self.made(n, generator_of(*key)) for n, key in keys)

    def made(self, count, generator):
        share = 0.5 + 0.12 * torch.randn(count, generator=generator)
        x = torch.randn(count, self.size, 24, generator=generator)
        signs = (torch.rand(count, self.size, generator=generator) < share[:, None]).float() * 2 - 1
        x[..., 0] = x[..., 1].abs() * signs * x[..., 2].sign() + 0.3 * x[..., 0]  # a kind is told by two columns
        return x, (share > 0.5).long()

    def prepare(self, part, generator, crop=False):
        if not crop:
            return part[:1], part[1:]
        return (part[0][:, torch.randperm(self.size, generator=generator)[: self.size // 10]],), part[1:]

    def body(self):
        return nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())

    def head(self):
        return nn.Sequential(Mean(), nn.Linear(32, 2))

    def mask(self, choose, p):
        return Backdrop(p, dims=(0, 1), exact=True, choose=choose)

    def loss(self, scores, labels):
        return F.cross_entropy(scores, labels)

    def measure(self, model, part):
        return errors(torch.cat([self.shown(model, (x,)) for x in part[0].split(100)]), part[1])


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)
