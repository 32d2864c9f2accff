"""`lrpfx.evaluate` for texts, arrays and graphs, whose parts are deleted."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lrpfx
from lrpfx.errors import InputError, InputTypeError
from lrpfx.explanation import captures
from lrpfx.explanation.captures import KEPT
from lrpfx.measures import Edges, PartData, PartDeletion, Parts, RandomDeletion, Tokens, Values
from lrpfx.measures.metrics import correlations
from lrpfx.measures.part_methods import PartMethods
from lrpfx.measures.sample import PartSample, random_masks

ZERO = 0.0
WORDS = ["[PAD]", "[CLS]", "the", "film", "was", "good", "bad"]


class Tokenizer:
    all_special_ids = (0, 1)
    mask_token_id, pad_token_id = None, 0

    def __len__(self):
        return len(WORDS)

    def __call__(self, text, return_tensors=None, add_special_tokens=True):
        ids = [*([1] if add_special_tokens else []), *map(WORDS.index, text.split())]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def convert_ids_to_tokens(self, ids):
        return [WORDS[int(number)] for number in ids]

    def decode(self, ids):
        return " ".join(self.convert_ids_to_tokens(ids))


class Critic(nn.Module):
    """Counts good words against bad ones, and nothing else; one logit for each class, or those of a next word at each place."""

    def __init__(self, generates=False):
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), 2)
        self.embedding.weight.data.zero_()
        self.embedding.weight.data[5, 1] = self.embedding.weight.data[6, 0] = 2.0
        self.head = nn.Linear(2, len(WORDS) if generates else 2, bias=False)
        self.head.weight.data[:2] = torch.eye(2)
        self.generates = generates

    def forward(self, input_ids):
        vectors = self.embedding(input_ids)
        return self.head(vectors.cumsum(1) if self.generates else vectors.sum(1))


class Sums(nn.Module):
    """A class for each column of the weights, (steps * features, classes)."""

    def __init__(self, weights):
        super().__init__()
        self.dense = nn.Linear(*weights.shape, bias=False)
        self.dense.weight.data.copy_(weights.T)

    def forward(self, x):
        return self.dense(x.flatten(1))


class Graphs(nn.Module):
    """The sum over the edges of what the source sends, times the weight of the edge; a row for the graph, or for each node."""

    def __init__(self, of_nodes=False):
        super().__init__()
        self.sent, self.of_nodes = nn.Linear(2, 2, bias=False), of_nodes
        self.sent.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))

    def forward(self, x, edge_index, edge_weight):
        messages = self.sent(x)[edge_index[0]] * edge_weight[:, None]
        found = torch.zeros(len(x), 2, dtype=x.dtype).index_add(0, edge_index[1], messages)
        return found if self.of_nodes else found.sum(0, keepdim=True)


def graph(number=0):
    edges = torch.tensor([[0, 1, 2, 2], [1, 0, 1, 0]])
    return SimpleNamespace(
        x=torch.tensor([[3.0, 0], [0, 1], [1 + number, 0]]), edge_index=edges, edge_weight=torch.rand(4) + 0.5
    )


def scores_of(data, number, masks):
    """The probability of the predicted class, written plainly."""
    outputs = data.parts.outputs(data.inputs[number], masks).detach()
    whole = data.parts.outputs(data.inputs[number], torch.zeros(1, masks.shape[1], dtype=torch.bool))
    return outputs.softmax(1)[:, whole.argmax()]


def areas(score, relevance):
    """The areas under the curves when parts are deleted one by one, most and least relevant first."""
    found = []
    for order in (relevance.argsort(descending=True, stable=True), relevance.argsort(descending=True, stable=True).flip(0)):
        masks = torch.zeros(len(relevance) + 1, len(relevance), dtype=torch.bool)
        for step, place in enumerate(order, 1):
            masks[step:, place] = True
        found.append(torch.trapezoid(score(masks), dx=1 / len(relevance)))
    return found


DATA = {
    "tokens": lambda: PartData(
        Tokens(Critic().eval(), Tokenizer()), ["the film was good", "bad the bad film was good", "was good good film"]
    ),
    "next token": lambda: PartData(Tokens(Critic(True).eval(), Tokenizer()), ["the film was good", "was bad film"]),
    "values": lambda: PartData(Values(Sums(torch.randn(6, 3)).eval(), ZERO), torch.randn(4, 3, 2)),
    "steps": lambda: PartData(
        Values(Sums(torch.randn(6, 3)).eval(), fill=torch.tensor([0.1, -0.2]), by="step"), torch.randn(4, 3, 2)
    ),
    "features": lambda: PartData(Values(Sums(torch.randn(6, 3)).eval(), ZERO, by="feature"), torch.randn(4, 3, 2)),
    "waves": lambda: PartData(Values(Sums(torch.randn(5, 2)).eval(), fill=0.5), torch.randn(3, 5)),
    "graphs": lambda: PartData(Edges(Graphs().eval()), [graph(), graph(1)]),
    "nodes": lambda: PartData(Edges(Graphs(True).eval()), [(graph(), 1), (graph(1), 0)]),
}


@pytest.mark.parametrize("kind", DATA)
def test_metrics_are_as_written_plainly(kind):
    data = DATA[kind]()
    maps = [torch.randn(data.count_of(number)) for number in range(len(data))]
    places = {str(one): number for number, one in enumerate(data.inputs)}
    methods = {"mine": lambda given, target: maps[places[str(given)]], "random": "random"}
    found = lrpfx.evaluate(methods, data, [PartDeletion(None), RandomDeletion(7)])
    assert list(found.metrics) == ["deletion", "morf", "lerf", "random_deletion"] and found.unit == "forwards"
    for number, relevance in enumerate(maps):
        most, least = areas(lambda masks, number=number: scores_of(data, number, masks), relevance)
        masks = random_masks(PartSample(number, None, None), 7, len(relevance))
        whole, *lost = scores_of(data, number, torch.cat([torch.zeros(1, len(relevance), dtype=torch.bool), masks]))
        agreement = correlations(relevance[None].double() @ masks.double().T, (whole - torch.stack(lost)).double())
        expected = torch.stack([least - most, most, least, agreement[0]]).double()
        torch.testing.assert_close(found.samples[0, :, number], expected, rtol=1e-5, atol=1e-6)


def methods_of(data):
    """Everything that explains data of this kind."""
    parts = data.parts
    names = ["attn_lrp", "occlusion", "random"]
    if isinstance(parts, Values):
        return {name: name for name in (*names, "gradient_times_input", "integrated_gradients", "smooth_grad", "deep_lift")}
    options = {"tokenizer": parts.tokenizer} if isinstance(parts, Tokens) else {}
    more = ["deep_lift"] if isinstance(parts, Tokens) and not parts.model.generates else []
    return {**{name: name for name in names + more}, "explainer": lrpfx.Explainer(parts.model, composite="attn_lrp", **options)}


@pytest.mark.parametrize("kind", DATA)
def test_models_that_are_linear(kind):
    """Relevance of a linear model is what deletion takes from the output, whatever the method."""
    data = DATA[kind]()
    methods, parts = methods_of(data), data.parts
    built = PartMethods(methods, data)
    for number in range(len(data)):
        target, count = int(built.outputs[number].argmax()), data.count_of(number)
        outputs = parts.outputs(data.inputs[number], torch.cat([torch.zeros(1, count), torch.eye(count)]).bool())
        lost = (outputs[0] - outputs[1:])[:, target].detach().double()
        seen = {name: built.map(name, number, target) for name in methods}
        from_zero = [name for name in methods if name in ("attn_lrp", "explainer", "gradient_times_input")]
        for name in from_zero:
            torch.testing.assert_close(seen[name], seen["attn_lrp"], rtol=1e-5, atol=1e-6)
        from_fill = [name for name in methods if name in ("integrated_gradients", "deep_lift")]
        for name in from_fill + from_zero * (not isinstance(parts, Values) or parts.fill is ZERO):
            torch.testing.assert_close(seen[name], lost, rtol=1e-5, atol=1e-6)
    found = lrpfx.evaluate(methods, data)
    assert found.samples.isfinite().all() and set(found.prices) == set(methods)


def test_evidence_that_is_known():
    """Columns that a model reads: rules find them, and an order by chance does not. Masks have the shape of the input."""
    weights = torch.zeros(6, 2)
    weights[[1, 4], [0, 1]] = 3.0
    masks = torch.zeros(20, 3, 2, dtype=torch.bool)
    masks[:, [0, 2], [1, 0]] = True
    data = PartData(
        Values(Sums(weights).eval()), torch.rand(20, 3, 2) + 0.1, targets=0, groups=[n // 2 for n in range(20)], masks=masks
    )
    found = lrpfx.evaluate(["epsilon_plus", "random"], data)
    mean = {(one.method, one.metric): one.mean for one in found.scores}
    assert mean["epsilon_plus", "pointing_game"] == mean["epsilon_plus", "relevance_mass"] == 1.0
    assert mean["random", "relevance_mass"] < 0.6 and mean["epsilon_plus", "deletion"] > mean["random", "deletion"]
    assert "10 groups of 20 arrays" in str(found) and "forwards" in str(found)
    assert list(found.to_pandas().columns)[-1] == "forwards"


def test_choose_takes_parts():
    """An order by chance is not better than the default; explaining another class is not chosen, either."""
    data = PartData(Values(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()), torch.randn(20, 4))
    choice = lrpfx.choose({"chance": "random", "zero": lambda given, target: torch.zeros(4)}, data, "random_deletion")
    assert choice.is_baseline and choice.rejected == {"zero": "a map is exactly zero"}


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: PartData(Critic().eval(), ["the film", "film was"]), InputTypeError, r"such as lrpfx\.measures\.Tokens"),
        (lambda: PartData(Tokens(Critic().eval(), Tokenizer()), "the film was good"), InputTypeError, "inputs are a list"),
        (lambda: PartData(Tokens(Critic().eval(), Tokenizer()), ["film", "film was"]), InputError, "text 0 has 1 parts"),
        (lambda: PartData(Tokens(Critic().eval(), Tokenizer()), ["film was"]), InputError, "there is one group"),
        (lambda: Tokens(Critic().eval(), object()), InputError, "pass the id as fill="),
        (lambda: Tokens(Critic(), Tokenizer()), InputError, "training mode"),
        (lambda: PartData(Values(Sums(torch.rand(4, 2)).eval()), []), InputError, "there is no array"),
        (lambda: Values(Sums(torch.rand(4, 2)).eval(), fill="mean"), InputTypeError, "fill is a number"),
        (lambda: Tokens(Critic().eval(), Tokenizer(), fill="[PAD]"), InputError, "fill is the id of a token"),
        (lambda: Tokens(Critic().eval(), Tokenizer(), fill=-1), InputError, "fill is the id of a token"),
        (lambda: Values(Sums(torch.rand(4, 2)).eval(), by="column"), InputError, 'by is "value", "step" or "feature"'),
        (lambda: PartData(Values(Sums(torch.rand(4, 2)).eval()), [[1.0, 2.0], [3.0, 4.0]]), InputTypeError, "not list"),
        (
            lambda: PartData(Values(Sums(torch.rand(4, 2)).eval()), torch.rand(2, 4), masks=torch.ones(2, 4, dtype=torch.bool)),
            InputError,
            "mask 0 is full",
        ),
        (
            lambda: PartData(Values(Sums(torch.rand(4, 2)).eval()), torch.rand(2, 4), masks=torch.ones(2, 3, dtype=torch.bool)),
            InputError,
            "mask 0 has the shape",
        ),
    ],
)
def test_data_that_do_not_fit(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    ("methods", "metrics", "kind", "message"),
    [
        (["grad_cam"], None, InputError, "grad_cam is not for arrays"),
        (
            ["random"],
            "region_perturbation",
            InputError,
            "region_perturbation is not for PartData, which has the metrics deletion",
        ),
        (["random"], "pointing_game", InputError, r"pass PartData\(..., masks=\)"),
        ({"short": lambda given, target: torch.zeros(3)}, None, InputError, r"'short' returns, for array 0, the shape \(3,\)"),
        ({"odd": lambda given, target: torch.full((4,), torch.nan)}, None, InputError, "values that are not finite"),
        ({"kind": torch.nn.ReLU}, None, InputTypeError, "a function of"),
        ({"none": lambda given, target: None}, None, InputTypeError, "'none' returns, for array 0, NoneType"),
        ({"ragged": lambda given, target: [[1.0], [1.0, 2.0]]}, None, InputTypeError, "for array 0, list"),
        ({"complex": lambda given, target: given.to(torch.complex64)}, None, InputTypeError, "complex numbers"),
        ({"other": lrpfx.Explainer(Sums(torch.rand(4, 2)).eval())}, None, InputError, "'other' has another model"),
    ],
)
def test_methods_and_metrics_that_do_not_fit(methods, metrics, kind, message):
    data = PartData(Values(Sums(torch.rand(4, 2)).eval()), torch.rand(2, 4))
    with pytest.raises(kind, match=message):
        lrpfx.evaluate(methods, data, metrics)


def test_parts_of_ones_own():
    """A class of one's own: halves of a row. Functions and explainers explain it, composites do not."""

    class Halves(Parts):
        def count(self, given):
            return 2

        def outputs(self, given, deleted):
            return (given * ~deleted.repeat_interleave(2, 1)).sum(1, keepdim=True)

    data = PartData(Halves(), [torch.tensor([1.0, 2.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 5.0, 5.0])])
    found = lrpfx.evaluate({"sums": lambda given, target: given.reshape(2, 2).sum(1), "occlusion": "occlusion"}, data)
    torch.testing.assert_close(found.samples[0], found.samples[1])
    with pytest.raises(InputError, match="Halves does not say how a composite explains its inputs"):
        lrpfx.evaluate(["epsilon_plus"], data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PartData(Values(Sums(torch.rand(4, 2)).eval(), fill=torch.zeros(3)), torch.rand(2, 4)), r"the shape \(3,\)"),
        (lambda: PartData(Tokens(Critic().eval(), Tokenizer(), fill=9), ["film was", "was good"]), "fill=9, does not fit"),
        (lambda: PartData(Edges(Graphs(True).eval()), [(graph(), 3), (graph(1), 0)]), "node 3 is out of range"),
        (lambda: PartData(Edges(Graphs().eval()), [(graph(), 0), (graph(1), 0)]), "not a row for each node"),
        (lambda: PartData(Edges(Graphs(True).eval()), [graph(), graph(1)]), "not one row for the graph"),
        (lambda: in_training(PartData(Values(Sums(torch.rand(4, 2)).eval()), torch.rand(2, 4))), "training mode"),
    ],
)
def test_data_whose_model_does_not_fit(make, message):
    data = make()
    with pytest.raises(InputError, match=message):
        lrpfx.evaluate(["occlusion"], data)


def in_training(data):
    """As a user leaves a model who goes on to train."""
    data.parts.model.train()
    return data


@pytest.mark.parametrize("kind", ["values", "graphs"])
def test_functions_write_into_inputs_of_their_own(kind):
    data = DATA[kind]()

    def written(given):
        return given if isinstance(given, torch.Tensor) else given.x

    def writes(given, target):
        written(given).zero_()
        return torch.arange(data.count_of(0)).double()

    before = [written(given).clone() for given in data.inputs]
    lrpfx.evaluate({"writes": writes}, data, "sparseness")
    assert all(map(torch.equal, map(written, data.inputs), before))


class FillsIn(nn.Module):
    """Logits of words at each place, of which only those at the last word, place 3, depend on a word: the first one."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(len(WORDS), 4), nn.Linear(4, len(WORDS), bias=False)

    def forward(self, input_ids):
        first = self.embedding(input_ids)[:, 1:2]
        here = torch.arange(input_ids.shape[1])[None, :, None] == 3
        return self.head(torch.where(here, first, torch.ones_like(first)))


def test_the_word_at_a_mask_is_explained():
    """As explainers do; the last place would say nothing."""

    class Masks(Tokenizer):
        all_special_ids, mask_token_id = (0, 1, 4), 4

    data = PartData(Tokens(FillsIn().eval(), Masks()), ["film bad was good", "bad film was good"])  # "was" is the mask
    found = lrpfx.evaluate({"first": lambda given, target: torch.tensor([1.0, 0.0, 0.0])}, data, RandomDeletion(8))
    assert abs(found.scores[0].mean) > 0.9
    explained = lrpfx.evaluate(["attn_lrp"], data, RandomDeletion(8))
    assert abs(explained.scores[0].mean) > 0.9


class Padded(nn.Module):
    """Pads to an even length: a graph for each."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(2, 3)

    def forward(self, x):
        count = int(x.shape[1])
        return self.dense(torch.cat([x, x[:, :1]], 1) if count % 2 else x).relu().mean(1)


def test_graphs_that_fix_sizes_are_captured_again():
    """Each length as if it were alone, and no graph twice."""
    torch.manual_seed(0)
    parts = Values(Padded().eval(), by="step")
    data = PartData(parts, [torch.randn(length, 2) for length in (5, 6, 5, 7, 6)])
    methods = PartMethods(["epsilon_plus", "attn_lrp"], data)
    for number, given in enumerate(data.inputs):
        alone = PartMethods(["epsilon_plus"], PartData(Values(parts.model, by="step"), [given, given]))
        torch.testing.assert_close(methods.map("epsilon_plus", number, 1), alone.map("epsilon_plus", 0, 1))
        methods.map("attn_lrp", number, 1)
    assert len(parts._captured._made) == 3
    for length in range(8, 14):
        parts.by_composite("attn_lrp")(torch.randn(length, 2), 1)
    assert len(parts._captured._made) == KEPT  # however many sizes there are


@pytest.mark.parametrize("kind", ["tokens", "waves", "graphs", "nodes"])
def test_composites_share_what_was_captured(kind, monkeypatch):
    """One graph for all, and maps as of explainers, which have their own; a model that has changed is captured again."""
    captured, original = [], captures.capture
    monkeypatch.setattr(captures, "capture", lambda *given, **more: captured.append(1) or original(*given, **more))
    torch.manual_seed(0)
    data = DATA[kind]()
    options = {"tokenizer": data.parts.tokenizer} if kind == "tokens" else {}
    for count in (1, 2):
        for name in ("epsilon_plus", "attn_lrp", "gamma_by_depth"):
            explainer = lrpfx.Explainer(data.parts.model, composite=name, **options)
            methods = PartMethods({"shared": name, "alone": explainer}, data)
            shared, alone = (
                torch.cat([methods.map(which, number, 0) for number in range(len(data))]) for which in ("shared", "alone")
            )
            torch.testing.assert_close(shared, alone, rtol=1e-12, atol=1e-12)
            assert shared.any()
        assert len(captured) == count
        with torch.no_grad():
            for parameter in data.parts.model.parameters():
                parameter.mul_(torch.rand_like(parameter))


def test_composites_that_need_a_graph_of_their_own():
    """One that maps a module as a whole, which no graph of its parts serves."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(3, 3)

        def forward(self, x):
            return self.dense(x).relu()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), Whole(), nn.Linear(3, 2)).eval()
    inputs = torch.rand(3, 4)
    composite = lrpfx.composites.EpsilonPlus(layer_map=[(Whole, lrpfx.rules.Pass())])
    methods = PartMethods({"plus": "epsilon_plus", "whole": composite}, PartData(Values(model), inputs))
    explain_model = lrpfx.transform(model, composite)
    for number, given in enumerate(inputs):
        expected = lrpfx.attribute(explain_model, given[None], 1).relevance[0]
        torch.testing.assert_close(methods.map("whole", number, 1), expected)
        assert not torch.allclose(methods.map("plus", number, 1), expected)


@pytest.mark.parametrize("output", [None, "found"])
def test_explainers_get_series_as_the_model_does(output):
    """An explainer by itself reads an array of two dimensions as rows of a table."""

    class OfSteps(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(2, 3)

        def forward(self, x):
            found = self.dense(x).relu().cumsum(-2)[..., -1, :].reshape(-1, 3)
            return found if output is None else {output: found}

    torch.manual_seed(0)
    parts = Values(OfSteps().eval(), by="step", output=output)
    explainer = lrpfx.Explainer(parts.model, composite="epsilon_plus", output=output)
    methods = PartMethods({"e": explainer, "c": "epsilon_plus"}, PartData(parts, [torch.randn(5, 2), torch.randn(3, 2)]))
    for number in range(2):
        torch.testing.assert_close(methods.map("e", number, 1), methods.map("c", number, 1))


def test_in_inference_mode_gradients_are_taken():
    data = DATA["values"]()
    expected = lrpfx.evaluate(["gradient_times_input", "epsilon_plus"], data, "random_deletion")
    with torch.inference_mode():
        found = lrpfx.evaluate(["gradient_times_input", "epsilon_plus"], data, "random_deletion")
    torch.testing.assert_close(found.samples, expected.samples)
