"""Metrics: numbers that say how good a map is. Each gives all methods' maps of one input their numbers at once."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lrpfx.errors import nearest
from lrpfx.measures.data import Data, invalid, wrong_type
from lrpfx.measures.deletion import ScoreMasked, deletions
from lrpfx.measures.perturbation import FILLS, ImageSample, default_side, sums_over_blocks
from lrpfx.measures.sample import PartSample, Sample, random_masks
from lrpfx.support.numbers import positive_number, whole_number


class Metric(ABC):
    """Base of the metrics.

    It has a `name`, and says which `samples` it takes, whether it `needs_masks`, and whether it `explains_again`.
    """

    name: ClassVar[str]
    samples: ClassVar[type[Sample]] = Sample
    needs_masks: ClassVar[bool] = False
    explains_again: ClassVar[bool] = False

    @property
    def columns(self) -> Mapping[str, str]:
        """The numbers that it gives by name, with what is better: "higher", "lower", or "" for neither."""
        return {self.name: "higher"}

    @abstractmethod
    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The numbers of each column for all methods, (methods,), float64.

        `sample`: the input. `maps`: the relevance of its pixels by each method, (methods, H, W), or of its parts, (methods, 1,
        parts), float64, on the CPU.
        """


@dataclass(frozen=True)
class _Perturbing(Metric):
    """Base of metrics that fill blocks of pixels. As Rong et al. 2022 found, the fill decides much: compare several."""

    samples: ClassVar[type[Sample]] = ImageSample
    fill: str = "mean"
    block: int | None = None

    def __post_init__(self) -> None:
        if self.fill not in FILLS:
            raise invalid(f"blocks are filled with {', '.join(FILLS)}, not {self.fill!r}.{nearest(str(self.fill), FILLS)}")
        if self.block is not None:
            whole_number(self.block, "block is the side of blocks in pixels", 1, "evaluation")

    def _side(self, sample: ImageSample) -> int:
        side = default_side(sample.image) if self.block is None else self.block
        size = tuple(sample.image.shape[1:])
        if side >= max(size):
            raise invalid(f"blocks of {side} pixels cover the whole image of {size}: choose smaller ones")
        return side


@dataclass(frozen=True)
class RegionPerturbation(_Perturbing):
    """Area between two curves: the probability of the class while the least, and the most relevant blocks are filled first.

    Columns: "region_perturbation_FILL", the area between the curves, from -1 to 1, of which chance has 0; and the areas under
    both, "morf_FILL" (most relevant first) and "lerf_FILL" (least relevant first), from 0 to 1. Samek et al. [1]_ measure the
    first; the second guards against orders that only leave the distribution of images quickly. Blocks of equal relevance are
    filled row by row, and backwards in the second curve.

    Attributes
    ----------
    fill
        What blocks are filled with: the "mean" of each channel of the image, "blur" (a Gaussian whose standard deviation is the
        side of a block), "noise" (uniform over the range of each channel), or "road" (imputed from the neighbours [2]_, so that
        filled blocks are hard to tell from the image; it takes some ten times as long as a forward).
    block
        The side of blocks in pixels; by default a fourteenth of the shorter side of the image.
    steps
        In how many steps, equal to rounding, all blocks are filled.

    Raises
    ------
    InputError
        There is no such fill, or a number is not positive.

    References
    ----------
    .. [1] Samek et al. 2017, https://doi.org/10.1109/TNNLS.2016.2599820
    .. [2] Rong et al. 2022, https://proceedings.mlr.press/v162/rong22a.html
    """

    name: ClassVar[str] = "region_perturbation"
    steps: int = 14

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.steps, "steps is a number of steps", 1, "evaluation")

    @property
    def columns(self) -> Mapping[str, str]:
        return {f"{self.name}_{self.fill}": "higher", f"morf_{self.fill}": "lower", f"lerf_{self.fill}": "higher"}

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert isinstance(sample, ImageSample)
        side = self._side(sample)
        return _areas(lambda masks: sample.scores(masks, self.fill, side), sums_over_blocks(maps, side), self.steps)


def _areas(score: ScoreMasked, relevance: torch.Tensor, steps: int | None) -> tuple[torch.Tensor, ...]:
    """The areas between the two curves, and under both, for the relevance of units by all methods, (methods, units)."""
    curves = deletions(score, {str(number): one for number, one in enumerate(relevance)}, steps).values()
    areas = [(one.area, one.area_most_relevant_first, one.area_least_relevant_first) for one in curves]
    return tuple(torch.tensor(areas, dtype=torch.float64).T)


@dataclass(frozen=True)
class PartDeletion(Metric):
    """Area between two curves: the score of an input while the least, and the most relevant of its parts are deleted first.

    As `RegionPerturbation`, for parts of any kind, such as tokens, samples and edges [1]_. Columns: "deletion", the area
    between the curves, of which chance has 0, "morf" (most relevant first) and "lerf" (least relevant first). Parts of equal
    relevance are deleted in their order, and backwards in the second curve.

    Attributes
    ----------
    steps
        In how many steps, equal to rounding, all parts are deleted; None for one by one.

    Raises
    ------
    InputError
        `steps` is not positive.

    References
    ----------
    .. [1] Samek et al. 2017, https://doi.org/10.1109/TNNLS.2016.2599820
    """

    name: ClassVar[str] = "deletion"
    samples: ClassVar[type[Sample]] = PartSample
    steps: int | None = 14

    def __post_init__(self) -> None:
        if self.steps is not None:
            whole_number(self.steps, "steps is a number of steps, or None", 1, "evaluation")

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.name: "higher", "morf": "lower", "lerf": "higher"}

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert isinstance(sample, PartSample)
        return _areas(sample.scores, maps[:, 0], self.steps)


@dataclass(frozen=True)
class RandomMasks(_Perturbing):
    """Correlation of what random masks hide, by the map, and what the model loses (faithfulness correlation [1]_).

    Each mask hides half of the blocks. The column "random_masks_FILL" is Pearson's correlation, over the masks, of the
    relevance that a mask hides with the probability of the class that it takes away; 0 if one of them is the same for all
    masks. All methods share the masks, so a further method costs no forwards.

    Attributes
    ----------
    fill
        As for `RegionPerturbation`.
    block
        As for `RegionPerturbation`.
    count
        How many masks there are for each image.

    Raises
    ------
    InputError
        There is no such fill, or a number is too small.

    References
    ----------
    .. [1] Bhatt et al. 2020, https://www.ijcai.org/proceedings/2020/417
    """

    name: ClassVar[str] = "random_masks"
    count: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number(self.count, "count is a number of masks", 3, "evaluation")

    @property
    def columns(self) -> Mapping[str, str]:
        return {f"{self.name}_{self.fill}": "higher"}

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert isinstance(sample, ImageSample)
        side = self._side(sample)
        relevance = sums_over_blocks(maps, side)
        masks = random_masks(sample, self.count, relevance.shape[1])
        return (_agreement(lambda some: sample.scores(some, self.fill, side), relevance, masks),)


def _agreement(score: ScoreMasked, relevance: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The correlation of the relevance that masks, (n, units), take away with what the score loses, for all methods."""
    whole, *lost = score(torch.cat([torch.zeros_like(masks[:1]), masks]))
    return correlations(relevance @ masks.double().T, whole - torch.stack(lost))


@dataclass(frozen=True)
class RandomDeletion(Metric):
    """Correlation of what random deletions take away, by the map, and what the score loses (faithfulness correlation [1]_).

    As `RandomMasks`, for parts of any kind: each mask deletes half of them. All methods share the masks.

    Attributes
    ----------
    count
        How many masks there are for each input.

    Raises
    ------
    InputError
        `count` is too small.

    References
    ----------
    .. [1] Bhatt et al. 2020, https://www.ijcai.org/proceedings/2020/417
    """

    name: ClassVar[str] = "random_deletion"
    samples: ClassVar[type[Sample]] = PartSample
    count: int = 40

    def __post_init__(self) -> None:
        whole_number(self.count, "count is a number of masks", 3, "evaluation")

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert isinstance(sample, PartSample)
        relevance = maps[:, 0]
        return (_agreement(sample.scores, relevance, random_masks(sample, self.count, relevance.shape[1])),)


def correlations(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation of each row of (n, samples) with values, (samples,); 0 where one of them does not vary."""
    first, second = rows - rows.mean(1, keepdim=True), values - values.mean()
    varies = (_spread(rows) > 0) & (_spread(values[None]) > 0)
    found = torch.nn.functional.cosine_similarity(first, second[None], dim=1, eps=0.0)
    return torch.where(varies, found, 0.0)


def _spread(rows: torch.Tensor) -> torch.Tensor:
    """How far the values of each row lie apart; 0 if it is no more than the rounding of sums."""
    apart, largest = rows.amax(1) - rows.amin(1), rows.abs().amax(1)
    return torch.where(apart > 1e-12 * largest, apart, 0.0)


@dataclass(frozen=True)
class PointingGame(Metric):
    """Whether the most relevant pixel is in the mask [1]_, without a margin: 1 or 0.

    Of several pixels that are equally the most relevant, the share that is in the mask.

    References
    ----------
    .. [1] Zhang et al. 2018, https://doi.org/10.1007/s11263-017-1059-x
    """

    name: ClassVar[str] = "pointing_game"
    needs_masks: ClassVar[bool] = True

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = maps == maps.amax((1, 2), keepdim=True)
        return (_sum_inside(sample, largest.double()) / largest.sum((1, 2)),)


@dataclass(frozen=True)
class RelevanceMass(Metric):
    """The share of positive relevance that is in the mask [1]_, from 0 to 1; 0 for a map without positive relevance.

    References
    ----------
    .. [1] Arras et al. 2022, https://doi.org/10.1016/j.inffus.2021.11.008
    """

    name: ClassVar[str] = "relevance_mass"
    needs_masks: ClassVar[bool] = True

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positive = maps.clamp(min=0.0)
        total = positive.sum((1, 2))
        return (torch.where(total > 0, _sum_inside(sample, positive) / total, 0.0),)


@dataclass(frozen=True)
class RelevanceRank(Metric):
    """Of the most relevant pixels, as many as the mask has, the share that is in the mask [1]_, from 0 to 1.

    Pixels that are equally relevant count by the share of them that is in the mask.

    References
    ----------
    .. [1] Arras et al. 2022, https://doi.org/10.1016/j.inffus.2021.11.008
    """

    name: ClassVar[str] = "relevance_rank"
    needs_masks: ClassVar[bool] = True

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert sample.mask is not None
        size = int(sample.mask.sum())
        least = maps.flatten(1).topk(size).values[:, -1, None, None]
        above, tied = maps > least, maps == least
        places = size - above.sum((1, 2))  # that remain for the tied pixels
        inside = _sum_inside(sample, above.double()) + places * _sum_inside(sample, tied.double()) / tied.sum((1, 2))
        return (inside / size,)


def _sum_inside(sample: Sample, maps: torch.Tensor) -> torch.Tensor:
    """The sum of each map, (methods, H, W), over the mask, (methods,)."""
    assert sample.mask is not None
    return (maps * sample.mask.cpu()).sum((1, 2))


@dataclass(frozen=True)
class Sparseness(Metric):
    """Gini index of the magnitudes of relevance [1]_: 0 if all pixels have the same, almost 1 if one pixel has all of it.

    It describes maps, and does not rank them: a sharp map may be wrong. A map of zeros has 0.

    References
    ----------
    .. [1] Chalasani et al. 2020, https://proceedings.mlr.press/v119/chalasani20a.html
    """

    name: ClassVar[str] = "sparseness"

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.name: ""}

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ordered = maps.flatten(1).abs().sort(1).values
        count = ordered.shape[1]
        weights = 2.0 * torch.arange(1, count + 1, dtype=torch.float64) - count - 1
        total = ordered.sum(1)
        return (torch.where(total > 0, ordered @ weights / (count * total), 0.0),)


@dataclass(frozen=True)
class Complexity(Metric):
    """Entropy of the shares that pixels have of the magnitudes of relevance [1]_: 0 if one pixel has all, log(pixels) at most.

    It describes maps, and does not rank them. A map of zeros has 0.

    References
    ----------
    .. [1] Bhatt et al. 2020, https://www.ijcai.org/proceedings/2020/417
    """

    name: ClassVar[str] = "complexity"

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.name: ""}

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        magnitudes = maps.flatten(1).abs()
        total = magnitudes.sum(1, keepdim=True)
        return (torch.special.entr(torch.where(total > 0, magnitudes / total, 0.0)).sum(1),)


@dataclass(frozen=True)
class Sensitivity(Metric):
    """The largest change of the map, relative to the map, for small changes of the image (max-sensitivity [1]_).

    Both are measured by the Euclidean norm. It does not rank methods: a map that ignores the model has 0. A map of zeros has 0.

    Attributes
    ----------
    radius
        Every pixel changes by as much at most, as a share of the range of its channel.
    count
        How many changed copies of each image every method explains.

    Raises
    ------
    InputError
        A number is out of range.

    References
    ----------
    .. [1] Yeh et al. 2019, https://arxiv.org/abs/1901.09392
    """

    name: ClassVar[str] = "sensitivity"
    samples: ClassVar[type[Sample]] = ImageSample
    explains_again: ClassVar[bool] = True
    radius: float = 0.02
    count: int = 10

    def __post_init__(self) -> None:
        positive_number("radius", self.radius)
        whole_number(self.count, "count is a number of changed copies", 1, "evaluation")

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.name: ""}

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert isinstance(sample, ImageSample)
        image = sample.image
        size = self.radius * (image.amax((1, 2), keepdim=True) - image.amin((1, 2), keepdim=True))
        random = torch.rand((self.count, *image.shape), generator=sample.generator(), dtype=torch.float64).to(image)
        changes = (sample.explain(image + size * (2 * random - 1)) - maps[:, None]).flatten(2).norm(dim=2).amax(1)
        norms = maps.flatten(1).norm(dim=1)
        return (torch.where(norms > 0, changes / norms, 0.0),)


@dataclass(frozen=True)
class Randomization(Metric):
    """How alike a map stays while layers lose their weights, from the output to the input (cascading randomization [1]_).

    The numbers of each weight and bias are shuffled, which keeps their distribution. The column "randomization" is the mean,
    over the steps, of Spearman's correlation with the map of the model as it is: a map that follows the model has little. A map
    without differences has 1 if it stays as it is. Pixels that are 0 before and after, such as a blank background under a
    method that multiplies by the input, are alike whatever the weights are: "randomization_blank" is their share, and where it
    is large, so is the correlation.

    Attributes
    ----------
    steps
        In how many steps, of equal numbers of layers to rounding, all layers lose their weights.

    Raises
    ------
    InputError
        `steps` is not positive, or larger than the number of layers with weights.

    References
    ----------
    .. [1] Adebayo et al. 2018, https://arxiv.org/abs/1810.03292
    """

    name: ClassVar[str] = "randomization"
    samples: ClassVar[type[Sample]] = ImageSample
    explains_again: ClassVar[bool] = True
    steps: int = 4

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps is a number of steps", 1, "evaluation")

    @property
    def columns(self) -> Mapping[str, str]:
        return {self.name: "lower", f"{self.name}_blank": ""}

    def scores(self, sample: Sample, maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert isinstance(sample, ImageSample)
        others = sample.with_other_weights(self.steps)
        alike = [torch.stack([rank_correlation(*pair) for pair in zip(maps, other, strict=True)]) for other in others]
        blank = [((maps == 0) & (other == 0)).double().mean((1, 2)) for other in others]
        return torch.stack(alike).mean(0), torch.stack(blank).mean(0)


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Spearman's correlation of two maps; equal values have the mean of their ranks. 1 if neither varies, 0 if one does not."""
    varies = [bool(one.amax() > one.amin()) for one in (first, second)]
    if not any(varies):
        return torch.tensor(1.0, dtype=torch.float64)
    return correlations(_ranks(first)[None], _ranks(second))[0]


def _ranks(map: torch.Tensor) -> torch.Tensor:
    places, counts = map.flatten().unique(return_inverse=True, return_counts=True)[1:]
    ranks: torch.Tensor = counts.cumsum(0) - (counts.double() - 1) / 2
    return ranks[places]


METRICS: dict[str, type[Metric]] = {
    one.name: one
    for one in (
        RegionPerturbation,
        RandomMasks,
        PartDeletion,
        RandomDeletion,
        PointingGame,
        RelevanceMass,
        RelevanceRank,
        Sparseness,
        Complexity,
        Sensitivity,
        Randomization,
    )
}
"""The metrics by name."""


def as_metrics(values: Any, data: Data) -> list[Metric]:
    """The metrics that names and metrics stand for. `InputError` if they do not fit.

    None stands for all that the data allow and that do not explain again.
    """
    fitting = {name: one for name, one in METRICS.items() if issubclass(data.sample_type, one.samples)}
    has_masks = data.masks is not None
    if values is None:
        return [one() for one in fitting.values() if not one.explains_again and (has_masks or not one.needs_masks)]
    values = [values] if isinstance(values, (str, Metric)) else list(values)
    metrics = [_as_metric(value) for value in values]
    if not metrics:
        raise invalid(f"there is no metric; there are {', '.join(fitting)}")
    for one in metrics:
        if not issubclass(data.sample_type, one.samples):
            raise invalid(f"{one.name} is not for {type(data).__name__}, which has the metrics {', '.join(fitting)}")
        if one.needs_masks and not has_masks:
            raise invalid(f"{one.name} needs masks: pass {type(data).__name__}(..., masks=), which say where the evidence is")
    columns = [column for one in metrics for column in one.columns]
    twice = next((column for column in columns if columns.count(column) > 1), None)
    if twice is not None:
        raise invalid(f"two metrics have the column {twice}: evaluate them in two calls")
    return metrics


def _as_metric(value: Any) -> Metric:
    if isinstance(value, Metric):
        return value
    if isinstance(value, type) and issubclass(value, Metric):
        raise wrong_type(f"a metric is an object, not a class: {value.__name__}()")
    if not isinstance(value, str):
        raise wrong_type(f"a metric is a name or an object of lrpfx.measures, not {type(value).__name__}")
    if value not in METRICS:
        raise invalid(f"there is no metric named {value!r}; there are {', '.join(METRICS)}.{nearest(value, METRICS)}")
    return METRICS[value]()
