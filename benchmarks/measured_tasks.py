"""Models and inputs on which methods are measured: `TASKS`, for benchmarks/measured.py.

Where the evidence is planted, masks say where it is. Networks that are trained here are trained with three seeds.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import known_inputs
import torch
from sentence_pairs import PAIRS
from torch import nn
from torch.nn import functional

import lrpfx
from lrpfx.composites import AttnLRP
from lrpfx.demo import digits, faces, photographs, sentence_similarity, text_lines
from lrpfx.measures import ImageData, PartData, Parts, RandomDeletion, RandomMasks, Tokens, Values
from lrpfx.measures.parts import ExplainInput

SEEDS = (0, 1, 2)
DEFAULT = "default"
#: Methods for images.
OF_IMAGES = (
    *("gamma_by_depth", "epsilon_gamma_box", "epsilon_plus", "epsilon_plus_flat", "epsilon_alpha2_beta1", "guided_backprop"),
    *("excitation_backprop", "deep_lift", "gradient_times_input", "integrated_gradients", "smooth_grad", "grad_cam", "random"),
)
#: Methods for series and tables.
OF_VALUES = ("epsilon_plus", "attn_lrp", "deep_lift", "gradient_times_input", "integrated_gradients", "occlusion", "random")
#: Methods for texts.
OF_TOKENS = ("attn_lrp", "cp_lrp", "rel_p", "epsilon_plus", "deep_lift", "occlusion", "random")


@dataclass(frozen=True)
class Task:
    """What is measured: data for each seed, the metrics, of which the first one orders methods, and the methods."""

    title: str
    data: Callable[[], Iterator[ImageData | PartData]]
    metrics: Sequence[Any]
    methods: Sequence[str]


# --- photographs -------------------------------------------------------------------------------------------------------------


def mosaics(name: str) -> Iterator[ImageData]:
    """Four photographs in one, 84 times: each of seven twelve times in one quarter, among three whose classes are others."""
    network = photographs.load_classifier(name)
    whole = torch.stack([network.preprocess(photographs.load(one)) for one in photographs.PHOTOGRAPHS])
    with torch.no_grad():
        classes = network.model(whole).argmax(1)
    small = functional.avg_pool2d(whole, 2)
    side, images, targets, masks, groups = small.shape[2], [], [], [], []
    draw = random.Random(0)
    for asked, photograph in enumerate(photographs.PHOTOGRAPHS):
        others = [place for place in range(len(whole)) if classes[place] != classes[asked]]
        for number, three in enumerate(draw.sample(list(itertools.combinations(others, 3)), 12)):
            quarters = list(three)
            quarters.insert(number % 4, asked)
            rows = [torch.cat([small[quarters[row]], small[quarters[row + 1]]], 2) for row in (0, 2)]
            images.append(torch.cat(rows, 1))
            targets.append(int(classes[asked]))
            mask = torch.zeros(2, side, 2, side, dtype=torch.bool)
            mask[number % 4 // 2, :, number % 2] = True
            masks.append(mask.reshape(2 * side, 2 * side))
            groups.append(photograph)
    yield ImageData(network.model, torch.stack(images), targets, groups, torch.stack(masks))


def crops() -> Iterator[ImageData]:
    """Squares of seven photographs."""
    network = photographs.load_classifier()
    found = [(name, one) for name in photographs.PHOTOGRAPHS for one in photographs.crops([name])[::2]]
    images = torch.stack([network.preprocess_whole(one) for _, one in found])
    yield ImageData(network.model, images, groups=[name for name, _ in found])


def lines() -> Iterator[ImageData]:
    """Words upright and upside down, under PP-OCR's classifier of angles."""
    words = ["Relevance", "photograph", "network", "gradient", "evidence", "temple"]
    words += ["flower", "rocket", "coffee", "chelsea", "motorcycle", "layer"]
    images = torch.stack([text_lines.drawn(word) for word in words])
    written = (images < 0.5).any(1)
    rows, columns = written.any(2), written.any(1)
    masks = rows[:, :, None] & columns[:, None, :].cummax(2).values & columns.flip(1)[:, None, :].cummax(2).values.flip(2)
    yield ImageData(
        text_lines.load(),
        torch.cat([images, images.flip(2, 3)]),
        targets=[0] * len(words) + [1] * len(words),
        groups=[*words, *words],
        masks=torch.cat([masks, masks.flip(1, 2)]),
    )


class _Classes(nn.Module):
    """The logits of a network that returns places, too."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)[-1]


def face(stage: str, size: int) -> Iterator[ImageData]:
    """Windows around the astronaut's face, larger and smaller and moved, as a network of MTCNN gets them."""
    detector = faces.load_detector()
    image = faces.scaled(photographs.load("astronaut"))[None]
    middle, side = torch.tensor([225.0, 115.0]), 110.0
    windows = [
        torch.cat([middle + side * moved - side * scale / 2, middle + side * moved + side * scale / 2])
        for scale in (0.9, 1.1, 1.3)
        for moved in torch.tensor([[0.0, 0.0], [0.12, 0.0], [-0.12, 0.0], [0.0, 0.12], [0.0, -0.12]])
    ]
    yield ImageData(
        _Classes(detector.detector[stage]), faces.cut_out(image, torch.stack(windows)[None], size).detach(), targets=1
    )


# --- images that are drawn ---------------------------------------------------------------------------------------------------


def _network(channels: int, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((channels, 16, 32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


def _trained(
    model: nn.Module, draw: Callable[[int], tuple[torch.Tensor, ...]], steps: int, rate: float = 3e-3, batch: int = 64
) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        inputs, classes, *_ = draw(batch)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
    model.eval().requires_grad_(False)
    inputs, classes, *_ = draw(500)
    share = float((model(inputs).argmax(1) == classes).float().mean())
    if share < 0.95:
        raise RuntimeError(f"the network has learnt {share:.2f} of its task")
    return model


def draw_shapes(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A square, a disc, a cross or a ring of any brightness somewhere on noise, its number, and where it is."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    kinds = torch.randint(4, (count,))
    tops, lefts = (8 + 16 * torch.rand(2, count, 1, 1)).unbind()
    far, around = torch.maximum((y - tops).abs(), (x - lefts).abs()), ((y - tops) ** 2 + (x - lefts) ** 2).sqrt()
    near = torch.minimum((y - tops).abs(), (x - lefts).abs())
    shapes = torch.stack([far < 5, around < 6, (far < 6) & (near < 2), (around < 6) & (around > 3.5)])
    masks = shapes[kinds, torch.arange(count)]
    color = 1.0 + torch.rand(count, 3, 1, 1)
    return 0.4 * torch.randn(count, 3, 32, 32) + color * masks[:, None], kinds, masks


def shapes() -> Iterator[ImageData]:
    """Shapes on noise; their pixels are the evidence."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = _trained(_network(3, 4), draw_shapes, 300)
        images, kinds, masks = draw_shapes(60)
        yield ImageData(model, images, targets=kinds, masks=masks)


def marked_digits() -> Iterator[ImageData]:
    """Digits of which half have a bright mark at the border, which decides the class; its pixels are the evidence."""
    train, test = digits.load()
    for seed in SEEDS:
        torch.manual_seed(seed)

        def draw(count: int, source: Any = train) -> tuple[torch.Tensor, ...]:
            images = functional.interpolate(source.images[torch.randint(len(source.images), (count,))], scale_factor=4.0)
            masks = torch.zeros(count, 32, 32, dtype=torch.bool)
            for mask, place, edge in zip(masks, torch.randint(29, (count,)), torch.randint(4, (count,)), strict=True):
                side = mask if edge % 2 else mask.T
                side[29 * (edge // 2) : 29 * (edge // 2) + 3, place : place + 3] = True
            classes = torch.randint(2, (count,))
            return (
                torch.where(masks[:, None] & (classes == 1)[:, None, None, None], 1.5 * images.amax(), images),
                classes,
                masks,
            )

        model = _trained(_network(1, 2), draw, 600)
        images, classes, masks = draw(150, test)
        yield ImageData(model, images[classes == 1], targets=1, masks=masks[classes == 1])


# --- texts and series --------------------------------------------------------------------------------------------------------


class Numbers:
    """A tokenizer of texts that are numbers. 0 is for masks, and 1 begins a text."""

    all_special_ids, mask_token_id = (0, 1), 0

    def __len__(self) -> int:
        return 40

    def __call__(self, text: str, return_tensors: Any = None, add_special_tokens: bool = True) -> dict[str, Any]:
        ids = [*([1] if add_special_tokens else []), *map(int, text.split())]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The numbers as texts."""
        return [str(int(one)) for one in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text."""
        return " ".join(self.convert_ids_to_tokens(ids))


class Reader(nn.Module):
    """A transformer of two layers, whose classes depend on its first token's vector."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(40, 32), nn.Parameter(0.1 * torch.randn(13, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The logits, (batch, 3), for ids, (batch, 13)."""
        return self.head(self.encoder(self.words(input_ids) + self.places)[:, 0])


def draw_texts(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Thirteen ids of which one, 2 to 10, says the class, the first three the first one; the class, and where it stands."""
    ids = torch.randint(11, 40, (count, 13))
    ids[:, 0] = 1
    places, planted = torch.randint(1, 13, (count,)), torch.randint(9, (count,))
    ids[torch.arange(count), places] = 2 + planted
    # masks are seen in training, so that deletion asks what the network knows
    ids = torch.where((torch.rand(ids.shape) < 0.15) & (ids > 10), 0, ids)
    return ids, planted // 3, functional.one_hot(places, 13).bool()


def planted_tokens() -> Iterator[PartData]:
    """One token of twelve says the class."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = _trained(Reader(), draw_texts, 600, 2e-3)
        ids, classes, masks = draw_texts(40)
        ids = torch.where(ids == 0, 20, ids)  # no masks
        texts = [" ".join(map(str, one[1:].tolist())) for one in ids]
        yield PartData(Tokens(model, Numbers()), texts, targets=classes, masks=list(masks))


class _BothSigns(nn.Module):
    """A score as the logits of two classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.model(x)
        return torch.cat([-found, found], 1)


def planted_motifs(network: str) -> Iterator[PartData]:
    """Which of two motifs stands in a series of noise."""
    for seed in SEEDS:
        model, series, decides, _ = known_inputs.trained("a motif in noise", network, seed)
        yield PartData(Values(_BothSigns(model)), list(series[:40]), masks=list(decides[:40]))


class Similarities(Parts):
    """The tokens of sentences, by their similarity to others.

    Inputs are pairs: ids, (1, tokens), and the vector of another sentence, (1, features).
    """

    noun = "sentence"

    def __init__(self) -> None:
        self.minilm = sentence_similarity.load()
        self.model = self.minilm.model
        self.captured: list[Any] = []

    def pair(self, first: str, second: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The input for two sentences, of which the first is explained."""
        with torch.no_grad():
            return self.minilm.ids(first), self.model.embed(input_ids=self.minilm.ids(second))

    def count(self, given: Any) -> int:
        """The tokens between the special ones at both ends."""
        return int(given[0].shape[1]) - 2

    def outputs(self, given: Any, deleted: torch.Tensor) -> torch.Tensor:
        """The similarity, (n, 1)."""
        ids = given[0].expand(len(deleted), -1).clone()
        ids[:, 1:-1] = ids[:, 1:-1].masked_fill(deleted, self.minilm.tokenizer.mask_token_id)
        return self.model(ids, given[1].expand(len(deleted), -1))

    def facts(self) -> dict[str, Any]:
        """Its weights come with a package."""
        return {"parts": "MiniLM"}

    def by_composite(self, composite: Any) -> ExplainInput:
        """By relevance of the embeddings; the other sentence gets none."""
        compiled: list[nn.Module] = []

        def explain(given: Any, target: int) -> torch.Tensor:
            inputs = {"input_ids": given[0], "reference": given[1]}
            if not self.captured:
                two = {name: torch.cat([one, one]) for name, one in inputs.items()}
                self.captured.append(lrpfx.capture(self.model, two, constants=("reference",)))
            if not compiled:
                compiled.append(lrpfx.transform(self.captured[0], AttnLRP() if composite is None else composite))
            reference = None
            if composite == "deep_lift":
                ids = torch.full_like(given[0], self.minilm.tokenizer.mask_token_id)
                ids[:, [0, -1]] = given[0][:, [0, -1]]
                reference = {"input_ids": ids}
            found = lrpfx.attribute(compiled[0], inputs, target, reference=reference)
            return found.relevance["input_ids"][0, 1:-1].sum(1)

        return explain


def sentences() -> Iterator[PartData]:
    """Pairs of sentences under MiniLM."""
    parts = Similarities()
    yield PartData(parts, [parts.pair(one.first, one.second) for one in PAIRS])


MASKS, FINE = [RandomMasks(count=40)], [RandomMasks(count=40, block=4)]
LOCAL = ["relevance_mass", "relevance_rank", "pointing_game"]
TASKS: dict[str, Task] = {
    **{
        f"mosaics_{name}": Task(f"Mosaics of photographs, {title}", partial(mosaics, name), LOCAL, OF_IMAGES)
        for name, title in photographs.NETWORKS.items()
    },
    "photographs": Task("Squares of photographs, EfficientNet-Lite0", crops, MASKS, OF_IMAGES),
    "text_lines": Task("Lines of text, PP-OCR's classifier of angles", lines, [*MASKS, *LOCAL], OF_IMAGES),
    "second": Task("A face in 24 × 24 pixels, MTCNN's R-Net", partial(face, "second", 24), FINE, OF_IMAGES),
    "third": Task("A face in 48 × 48 pixels, MTCNN's O-Net", partial(face, "third", 48), FINE, OF_IMAGES),
    "shapes": Task("Shapes on noise, small convolutional networks", shapes, [*LOCAL, *MASKS], OF_IMAGES),
    "marked_digits": Task(
        "Digits with a planted mark, small convolutional networks", marked_digits, [*LOCAL, *MASKS], OF_IMAGES
    ),
    "planted_tokens": Task(
        "A planted token, small transformers", planted_tokens, [*LOCAL, "deletion", RandomDeletion()], OF_TOKENS
    ),
    **{
        f"motifs_{network}": Task(
            f"A planted motif, {network}",
            partial(planted_motifs, network),
            [*LOCAL, "deletion", RandomDeletion()],
            OF_VALUES,
        )
        for network in ("LSTM", "TCN", "PatchTST")
    },
    "sentences": Task("Tokens of sentences, MiniLM", sentences, ["deletion", RandomDeletion()], OF_TOKENS),
}
