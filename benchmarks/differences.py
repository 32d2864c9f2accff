"""DeepLIFT of lrpfx beside that of shap and Captum: what relevance misses of the difference of the outputs, and what it costs.

It also measures DeepLIFT beside LRP and integrated gradients, on photographs and sentences, as docs/gallery.md does. Run as a
program, it writes these tables of docs/differences.md.
"""

import copy
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import captum.attr
import gallery
import sentence_explanations
import shap
import torch
import torchvision
from documents import write_between
from sentence_pairs import PAIRS
from torch import nn
from torch.nn import functional as F
from torchvision.transforms.functional import gaussian_blur
from transformers import BertConfig, BertForSequenceClassification

import lrpfx
from lrpfx.composites import AttnLRP, DeepLIFT
from lrpfx.demo import sentence_similarity
from lrpfx.demo.photographs import load_classifier
from lrpfx.measures.deletion import deletions
from lrpfx.measures.intervals import means

DOCUMENT = Path(__file__).parent.parent / "docs" / "differences.md"
WIDTH, SAMPLES, REPEATS = 16, 8, 15


class Of(nn.Module):
    """A function between two dense layers. Modules that it calls are attributes of the network."""

    def __init__(self, function, **modules):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


def chain(activation):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), activation, nn.Linear(WIDTH, WIDTH), type(activation)(), nn.Linear(WIDTH, 3))


def attention(self, x):
    tokens = x.unflatten(1, (4, 4))
    return self.attention(tokens, tokens, tokens, need_weights=False)[0].flatten(1)


def pooled(self, x):
    """Attention pooling: a softmax over positions weighs them."""
    tokens = x.unflatten(1, (4, 4))
    return (tokens * self.scores(tokens).softmax(1)).sum(1).repeat(1, 4)


def block(self, x):
    """A block of a transformer over features, as FT-Transformer has."""
    tokens = x.unflatten(1, (4, 4))
    tokens = tokens + self.attention(self.norm(tokens), self.norm(tokens), self.norm(tokens), need_weights=False)[0]
    return (tokens + self.down(F.gelu(self.up(self.norm(tokens))))).flatten(1)


def twice(self, x):
    return self.relu(self.middle(self.relu(x)))


NETWORKS = {
    "ReLU modules in a chain": lambda: chain(nn.ReLU()),
    "GELU modules": lambda: chain(nn.GELU()),
    "SELU modules": lambda: chain(nn.SELU()),
    "SiLU modules": lambda: chain(nn.SiLU()),
    "functional ReLU": lambda: Of(lambda self, x: F.relu(x)),
    "one ReLU module, called twice": lambda: Of(twice, relu=nn.ReLU(), middle=nn.Linear(WIDTH, WIDTH)),
    "layer norm": lambda: Of(lambda self, x: self.norm(x), norm=nn.LayerNorm(WIDTH)),
    "softmax of a branch, times the other": lambda: Of(lambda self, x: x * x.softmax(1)),
    "gated linear unit": lambda: Of(lambda self, x: self.gate(x).repeat(1, 2), gate=nn.GLU()),
    "attention": lambda: Of(attention, attention=nn.MultiheadAttention(4, 2, batch_first=True)),
    "attention pooling": lambda: Of(pooled, scores=nn.Linear(4, 1)),
    "block of an FT-Transformer": lambda: Of(
        block,
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        norm=nn.LayerNorm(4),
        up=nn.Linear(4, 8),
        down=nn.Linear(8, 4),
    ),
    "LSTM": lambda: Of(lambda self, x: self.lstm(x.unflatten(1, (4, 4)))[0].flatten(1), lstm=nn.LSTM(4, 4, batch_first=True)),
}


def of_shap(model, x, reference):
    explainer = shap.DeepExplainer(model, reference)
    return torch.tensor(explainer.shap_values(x, check_additivity=False)[..., 1])


def of_captum(model, x, reference):
    return captum.attr.DeepLift(model).attribute(x, reference, target=1).detach()


def of_lrpfx(model, x, reference):
    return lrpfx.attribute(lrpfx.transform(model, DeepLIFT(), x), x, 1, reference=reference).relevance


METHODS = {"shap": of_shap, "Captum": of_captum, "lrpfx": of_lrpfx}


def gap(method, name):
    """The largest gap among samples, relative to the larger of both outputs, or the name of an error."""
    torch.manual_seed(0)
    model = NETWORKS[name]().eval().double()
    x, reference = torch.randn(SAMPLES, WIDTH), torch.randn(1, WIDTH)
    outputs = model(x)[:, 1].detach(), model(reference).expand(SAMPLES, -1)[:, 1].detach()
    try:
        found = METHODS[method](model, x, reference)
    except Exception as error:
        return type(error).__name__
    missed = (found.flatten(1).sum(1) - (outputs[0] - outputs[1])).abs()
    return f"{float((missed / torch.stack(outputs).abs().amax(0)).max()):.0e}"


def others():
    lines = [f"| network | {' | '.join(METHODS)} |", "| --- |" + " --- |" * len(METHODS)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(gap(one, name) for one in METHODS)} |" for name in NETWORKS)])


# --- cost --------------------------------------------------------------------------------------------------------------------


def convolutions():
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 64, 10)), torch.randn(16, 3, 32, 32)


def dense():
    layers = [one for _ in range(4) for one in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 10)), torch.randn(256, 512)


def transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(64 * 32, 10)), torch.randn(16, 32, 64)


def of_torchvision(name, size):
    torch.manual_seed(0)
    return getattr(torchvision.models, name)(weights=None), torch.randn(2, 3, size, size)


class OfVectors(nn.Module):
    """A BERT of four layers that reads vectors in place of tokens."""

    def __init__(self):
        super().__init__()
        self.bert = BertForSequenceClassification(BertConfig(num_hidden_layers=4, vocab_size=1000))

    def forward(self, vectors):
        return self.bert(inputs_embeds=vectors).logits


CASES = {"dense layers": dense, "convolutions": convolutions, "a transformer": transformer}
ORDINARY = {
    "ResNet-50, 2 × 128²": lambda: of_torchvision("resnet50", 128),
    "ViT-B/16, 2 × 224²": lambda: of_torchvision("vit_b_16", 224),
    "BERT of 4 layers, 2 × 128": lambda: (OfVectors(), torch.randn(2, 128, 768)),
}


def seconds_of(call):
    """Seconds of the processor, whatever else it does."""
    start = time.process_time()
    call()
    return time.process_time() - start


def contenders_of(model, x):
    """Calls that attribute the second output of each sample to its input."""
    reference = torch.randn_like(x)
    explain_model = lrpfx.transform(model, DeepLIFT(), x)
    copies = copy.deepcopy(model), copy.deepcopy(model)  # their hooks stay after an error
    by_captum, by_shap = captum.attr.DeepLift(copies[0]), shap.DeepExplainer(copies[1], reference[:1])

    def gradient():
        leaf = x.clone().requires_grad_()
        torch.autograd.grad(model(leaf)[:, 1].sum(), leaf)

    return {
        "gradient": gradient,
        "lrpfx": lambda: lrpfx.attribute(explain_model, x, 1, reference=reference),
        "Captum": lambda: by_captum.attribute(x, reference, target=1),
        "shap": lambda: by_shap.shap_values(x, ranked_outputs=1, check_additivity=False),
    }


def error_of(call):
    """The name of the error of a call, or None."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None


def cost():
    """Medians of ratios to the gradient, on one thread; all contenders run in turn."""
    torch.set_num_threads(1)  # a second one that waits counts as processor time
    lines = ["| network | gradient | lrpfx | Captum | shap |", "| --- | --- | --- | --- | --- |"]
    for name, make in {**CASES, **ORDINARY}.items():
        torch.manual_seed(0)
        model, x = make()
        contenders = contenders_of(model.eval(), x)
        failed = {key: error_of(call) for key, call in contenders.items()}
        running = {key: call for key, call in contenders.items() if failed[key] is None}
        repeats = REPEATS if name in CASES else REPEATS // 3
        rounds = [{key: seconds_of(call) for key, call in running.items()} for _ in range(repeats)]
        base = statistics.median(one["gradient"] for one in rounds)
        cells = [
            f"{statistics.median(one[key] / one['gradient'] for one in rounds):.2f}" if key in running else failed[key]
            for key in list(contenders)[1:]
        ]
        lines.append(f"| {name} | {1000 * base:.1f} ms | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- which method ------------------------------------------------------------------------------------------------------------

VIEWS = 2  # of each photograph
OF_PHOTOGRAPHS = (gallery.OURS, "EpsilonPlus", "integrated gradients", "gradient × input", gallery.RANDOM)


def of_photographs():
    """The areas between deletion curves of blocks, with intervals over the photographs."""
    classifier = load_classifier("lite0")
    explain_model = lrpfx.transform(classifier.model, DeepLIFT(), torch.zeros(2, 3, classifier.size, classifier.size))

    def against(reference_of):
        return lambda _, images, targets: (
            lrpfx.attribute(explain_model, images, targets, reference=reference_of(images)).relevance
        )

    methods = {
        **{name: gallery.METHODS[name] for name in OF_PHOTOGRAPHS},
        "DeepLIFT, against the mean colour": against(torch.zeros_like),
        "DeepLIFT, against the blurred photograph": against(lambda images: gaussian_blur(images, [97, 97], [16.0, 16.0])),
    }
    return gallery.table(gallery.evaluated(classifier, methods, VIEWS))


def of_sentences():
    """The areas between deletion curves of tokens, with intervals over the pairs of sentences."""
    minilm = sentence_similarity.load()
    questions = []
    for pair in PAIRS:
        with torch.no_grad():
            similar_to = minilm.model.embed(input_ids=minilm.ids(pair.second))
        questions.append(sentence_explanations.Question(minilm.ids(pair.first), similar_to))
    program = sentence_explanations.export(minilm, questions[0])
    lrp = lrpfx.transform(program, AttnLRP(), constants=("reference",))
    deep_lift = lrpfx.transform(program, DeepLIFT(), constants=("reference",))

    def difference(question):
        inputs = {"input_ids": question.ids, "reference": question.reference}
        every = torch.ones(1, question.ids.shape[1] - 2, dtype=torch.bool)
        reference = {"input_ids": sentence_explanations.masked(minilm, question, every)}
        return lrpfx.attribute(deep_lift, inputs, 0, reference=reference).relevance["input_ids"].sum((0, 2))

    methods = {
        "AttnLRP": lambda question: sentence_explanations.lrp(lrp, question),
        "DeepLIFT, against masks": difference,
        "integrated gradients, from masks": lambda question: sentence_explanations.integrated_gradients(minilm, question),
        "gradient × input": lambda question: sentence_explanations.gradient_times_input(minilm, question),
        "occlusion": lambda question: sentence_explanations.occlusion(minilm, question),
    }
    areas = []
    for question in questions:
        relevances = {name: method(question)[question.inner] for name, method in methods.items()}
        curves = deletions(partial(sentence_explanations.score_masked, minilm, question), relevances)
        areas.append([curves[name].area for name in methods])
    between = torch.tensor(areas, dtype=torch.float64).T
    rows = zip(methods, means(between), means(between - between[0]), strict=True)
    lines = ["| method | area between the curves | minus AttnLRP |", "| --- | ---: | ---: |"]
    for name, area, minus in sorted(rows, key=lambda row: -row[1].mean):
        lines.append(f"| {name} | {area} | {'' if name == 'AttnLRP' else minus} |")
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    tables = {"others": others, "cost": cost, "photographs": of_photographs, "sentences": of_sentences}
    for key in sys.argv[1:] or tables:
        if key == "others":
            torch.set_default_dtype(torch.float64)
        text = tables[key]()
        torch.set_default_dtype(torch.float32)
        print(text)
        write_between(DOCUMENT, key, text)
