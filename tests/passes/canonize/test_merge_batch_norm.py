"""CANONIZE: batch norm merged by def-use, and the reason for each one that is left."""

import copy

import pytest
import torch
from combinations import each_pair
from helpers import assert_close, randomize_batch_norm, small_net, torchvision_model
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

import lrpfx
from lrpfx.composites import EpsilonPlus, GuidedBackprop

PAIRS = {
    "linear": (lambda bias: nn.Linear(4, 6, bias=bias), nn.BatchNorm1d, (4,)),
    "conv1d": (lambda bias: nn.Conv1d(4, 6, 3, padding=1, groups=2, bias=bias), nn.BatchNorm1d, (4, 5)),
    "conv2d": (lambda bias: nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2, bias=bias), nn.BatchNorm2d, (4, 5, 5)),
    "conv2d-reflect": (
        lambda bias: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", bias=bias),
        nn.BatchNorm2d,
        (4, 5, 5),
    ),
    "conv3d": (lambda bias: nn.Conv3d(4, 6, 2, bias=bias), nn.BatchNorm3d, (4, 3, 3, 3)),
    "conv_transpose1d": (lambda bias: nn.ConvTranspose1d(4, 6, 3, groups=2, bias=bias), nn.BatchNorm1d, (4, 5)),
    "conv_transpose2d": (lambda bias: nn.ConvTranspose2d(4, 6, 3, stride=2, bias=bias), nn.BatchNorm2d, (4, 3, 3)),
    "conv_transpose2d-groups": (lambda bias: nn.ConvTranspose2d(4, 6, 3, groups=2, bias=bias), nn.BatchNorm2d, (4, 3, 3)),
    "conv_transpose3d": (lambda bias: nn.ConvTranspose3d(4, 6, 2, groups=2, bias=bias), nn.BatchNorm3d, (4, 2, 2, 2)),
}


def merge_stage(explain_model):
    (stage,) = [stage for stage in lrpfx.history(explain_model) if stage.name == "merge_batch_norm"]
    return stage


@each_pair(pair=PAIRS, bias=[True, False], affine=[True, False], eps=[1e-5, 0.5])
def test_merging_keeps_the_output_and_has_the_rule_of_one_layer(pair, bias, affine, eps):
    """Relevance is that of a single layer with the merged weights: the batch norm, eps included, is gone."""
    make, norm, shape = PAIRS[pair]
    model = randomize_batch_norm(nn.Sequential(make(bias), norm(6, affine=affine, eps=eps))).eval()
    x = torch.randn(3, *shape)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert_close(explain_model(x), model(x), 1e-12)
    assert [name for name in lrpfx.node_names(explain_model) if "require" not in name] in (
        ["input", "0"],
        ["input", "0.pad", "0"],
    )
    merged = copy.deepcopy(model[0])
    batch_norm = model[1]
    if not pair.endswith("groups") and pair not in ("conv_transpose1d", "conv_transpose3d"):  # torch's fusion is wrong there
        weight, shift = fuse_conv_bn_weights(
            merged.weight, merged.bias, batch_norm.running_mean, batch_norm.running_var, eps, batch_norm.weight,
            batch_norm.bias, transpose="transpose" in pair,
        )  # fmt: skip
        merged.weight, merged.bias = weight, shift
        expected = lrpfx.attribute(lrpfx.transform(nn.Sequential(merged).eval(), EpsilonPlus()), x, lambda output: output)
        assert_close(lrpfx.attribute(explain_model, x, lambda output: output).relevance, expected.relevance, 1e-11)


@pytest.mark.parametrize("affine", [True, False])
def test_grouped_transposed_convolution_equals_separate_groups(affine):
    layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
    norm = randomize_batch_norm(nn.BatchNorm2d(6, affine=affine)).eval()
    x = torch.randn(2, 4, 3, 3)
    whole = lrpfx.attribute(lrpfx.transform(nn.Sequential(layer, norm).eval(), EpsilonPlus()), x, lambda output: output)
    for group in range(2):
        part, part_norm = nn.ConvTranspose2d(2, 3, 3), nn.BatchNorm2d(3, affine=affine).eval()
        part.load_state_dict({"weight": layer.weight[2 * group : 2 * group + 2], "bias": layer.bias[3 * group : 3 * group + 3]})
        state = {name: value[3 * group : 3 * group + 3] for name, value in norm.state_dict().items() if value.ndim}
        part_norm.load_state_dict(state, strict=False)
        explain_model = lrpfx.transform(nn.Sequential(part, part_norm).eval(), EpsilonPlus())
        alone = lrpfx.attribute(explain_model, x[:, 2 * group : 2 * group + 2], lambda output: output)
        assert_close(whole.relevance[:, 2 * group : 2 * group + 2], alone.relevance, 1e-12)


def test_by_use_and_not_by_order_of_registration():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_of_second = nn.BatchNorm2d(4)
            self.first = nn.Conv2d(4, 4, 1)
            self.norm_of_nothing_before = nn.BatchNorm2d(4)
            self.second = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.norm_of_second(self.second(torch.tanh(self.norm_of_nothing_before(torch.relu(self.first(x))))))

    model, x = randomize_batch_norm(Net()).eval(), torch.randn(2, 4, 3, 3)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert_close(explain_model(x), model(x), 1e-12)
    table = {row.name: row.merged for row in lrpfx.assignment(explain_model)}
    assert table["second"] == ("norm_of_second",) and table["first"] == ()
    assert "norm_of_nothing_before" in table
    assert merge_stage(explain_model).reasons == (
        ("norm_of_nothing_before", "its input comes from relu (relu), which is not a linear layer"),
    )


class SecondConsumer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        x = self.conv(x)
        return self.norm(x) + x


def test_reasons():
    cases = {
        "the output of conv has a second consumer: add": SecondConsumer(),
        "its input is an input of the model or comes from an opaque module": nn.Sequential(
            nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 3, 1)
        ),
        "its input comes from 1 (max_pool2d), which is not a linear layer": nn.Sequential(
            nn.Conv2d(3, 3, 1), nn.MaxPool2d(1), nn.BatchNorm2d(3)
        ),
    }
    x = torch.randn(2, 3, 4, 4)
    for reason, model in cases.items():
        model = randomize_batch_norm(model).eval()
        explain_model = lrpfx.transform(model, EpsilonPlus())
        stage = merge_stage(explain_model)
        assert stage.matches == 0 and [text for _, text in stage.reasons] == [reason]
        assert reason in str(stage)
        assert torch.equal(explain_model(x), model(x))
        norm = next(row for row in lrpfx.assignment(explain_model) if row.kind == "BatchNorm")
        assert norm.rule == "Pass()"


def test_flattening_less_leaves_more_than_two_dimensions():
    """Then the channels of the batch norm are not the features of the dense layer."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = nn.Linear(16, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.dense(x.flatten(2)))

    model, x = randomize_batch_norm(Net()).eval(), torch.randn(2, 3, 4, 4)
    for example in (None, x):
        assert_close(lrpfx.transform(model, EpsilonPlus(), example_inputs=example)(x), model(x), 1e-12)


@pytest.mark.usefixtures("no_guessed_inputs")
def test_flattening_less_is_checked_when_the_module_runs():
    model = randomize_batch_norm(nn.Sequential(nn.Flatten(2), nn.Linear(16, 3), nn.BatchNorm1d(3))).eval()
    with pytest.raises(lrpfx.InputError, match=r"shape \(batch, features\), but it has 3 dimensions"):
        lrpfx.transform(model, EpsilonPlus())(torch.randn(2, 3, 4, 4))


def test_counts_on_real_networks():
    for model, count in ((torchvision_model("resnet18"), 20), (torchvision_model("vgg11_bn"), 8), (small_net(), 2)):
        stage = merge_stage(lrpfx.transform(model, EpsilonPlus()))
        assert stage.matches == count
    assert stage.reasons == (("norm", "its input comes from average (avg_pool2d), which is not a linear layer"),)


def test_convolution_called_twice_merges_each_call():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.a, self.b = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x):
            return self.b(self.conv(self.a(self.conv(x)).relu()))

    model, x = randomize_batch_norm(Net()).eval(), torch.randn(2, 3, 4, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert {row.name: row.merged for row in lrpfx.assignment(explain_model) if row.merged} == {"conv": ("a",), "conv_1": ("b",)}
    assert_close(explain_model(x), model(x), 1e-12)


def test_nothing_to_do_changes_nothing():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.MaxPool2d(1), nn.BatchNorm2d(3), nn.Tanh()).eval()
    stages = lrpfx.history(lrpfx.transform(model, EpsilonPlus()))
    index = [stage.name for stage in stages].index("merge_batch_norm")
    assert stages[index].code == stages[index - 1].code and stages[index].matches == 0
    stages = lrpfx.history(lrpfx.transform(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()).eval(), EpsilonPlus()))
    assert not [stage for stage in stages if stage.stage == "canonize"]


class TestDenseLayers:
    """Batch norm acts on dimension 1, a dense layer on the last: the same for matrices only."""

    def model(self):
        return randomize_batch_norm(
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))
        )

    @pytest.mark.usefixtures("no_guessed_inputs")
    def test_unknown_shapes_are_checked_when_the_module_runs(self):
        model, x = self.model().eval(), torch.randn(2, 3)
        explain_model = lrpfx.transform(model, EpsilonPlus())
        assert_close(explain_model(x), model(x), 1e-12)
        assert lrpfx.node_names(explain_model).count("0.require_matrix") == 1
        with pytest.raises(lrpfx.InputError, match=r"batch norm was merged into a dense layer .* has 3 dimensions"):
            explain_model(torch.randn(2, 4, 3))

    def test_known_matrices_need_no_check(self):
        model = self.model().eval()
        explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=torch.randn(2, 3))
        assert "0.require_matrix" not in lrpfx.node_names(explain_model)
        flat = nn.Sequential(nn.Flatten(), *model).eval()
        assert lrpfx.node_names(lrpfx.transform(flat, EpsilonPlus())) == ["input", "0", "1", "3", "4"]

    def test_three_dimensions_are_not_merged(self):
        model, x = self.model().eval(), torch.randn(2, 4, 3)
        explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
        assert torch.equal(explain_model(x), model(x))
        assert merge_stage(explain_model).reasons[0] == (
            "1",
            "the output of 0 has 3 dimensions: its channels are the last dimension, but batch norm acts on the second",
        )


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 1, 1))
        self.register_buffer("mean", torch.randn(2))
        self.register_buffer("var", torch.rand(2) + 0.5)

    def forward(self, x):
        x = torch.conv2d(x, self.weight)
        return torch.batch_norm(x, None, None, self.mean, self.var, False, 0.1, 1e-5, False)


@pytest.mark.usefixtures("no_guessed_inputs")
def test_functions_merge_like_modules():
    model, x = Functional().eval(), torch.randn(2, 3, 4, 4)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert lrpfx.node_names(explain_model) == ["x", "conv2d.require_dimensions", "conv2d"]
    assert_close(explain_model(x), model(x), 1e-12)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert lrpfx.node_names(explain_model) == ["x", "conv2d"]
    assert_close(explain_model(x), model(x), 1e-12)


def test_merged_weights_of_functions_without_a_rule():
    """The derived buffers need a place where no module stands."""
    model, x = Functional().eval(), torch.randn(2, 3, 4, 4)
    explain_model = lrpfx.transform(model, GuidedBackprop())
    assert_close(explain_model(x), model(x), 1e-12)
    assert list(explain_model.state_dict()) == list(model.state_dict())


class Resized(nn.Module):
    """A batch norm before a ReLU and a convolution, the sizes of whose result are read as well."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        normed = self.norm(x)
        return self.conv(torch.relu(normed)).reshape(normed.shape[0], -1)


def test_a_reader_of_sizes_is_no_reader_of_a_batch_norm():
    model, x = randomize_batch_norm(Resized()).eval(), torch.randn(2, 3, 5, 5)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    (stage,) = [stage for stage in lrpfx.history(explain_model) if stage.name == "merge_batch_norm_right"]
    assert stage.details == (("norm", "merged into conv after the thresholded relu"),)
    assert_close(explain_model(x), model(x), 1e-5)


class TestSamplesWithoutABatch:
    """A convolution takes a sample without a batch; batch norm then acts on another dimension than its channels."""

    def model(self):
        return randomize_batch_norm(nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU())).eval()

    def test_known_shapes_are_not_merged(self):
        model, x = self.model(), torch.randn(4, 6)
        explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
        assert torch.equal(explain_model(x), model(x))
        assert "0 takes a sample without a batch" in merge_stage(explain_model).reasons[0][1]

    @pytest.mark.usefixtures("no_guessed_inputs")
    def test_unknown_shapes_are_checked_when_the_module_runs(self):
        model, x = self.model(), torch.randn(2, 4, 6)
        explain_model = lrpfx.transform(model, EpsilonPlus())
        assert_close(explain_model(x), model(x), 1e-12)
        with pytest.raises(lrpfx.InputError, match="input has 3 dimensions, the batch first, but it has 2"):
            explain_model(x[0])

    @pytest.mark.usefixtures("no_guessed_inputs")
    def test_one_check_is_enough(self):
        model = nn.Sequential(*self.model(), nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6)).eval()
        names = lrpfx.node_names(lrpfx.transform(model, EpsilonPlus()))
        assert [name for name in names if "require" in name] == ["0.require_dimensions"]


def test_through_views_that_keep_the_channels():
    """A batch norm of features along sequences is part of the dense layer; one of places is not."""

    class Sequences(nn.Module):
        def __init__(self, dims):
            super().__init__()
            self.linear, self.norm, self.dims = nn.Linear(4, 5), nn.BatchNorm1d(5), dims

        def forward(self, x):
            y = self.linear(x)
            return self.norm(y.permute(self.dims)).sum(2)

    x = torch.randn(3, 5, 4)
    for dims, reasons in (
        ((0, 2, 1), ()),
        ((0, 1, 2), (("norm", "its input comes from permute (permute), which is not a linear layer"),)),
    ):
        model = randomize_batch_norm(Sequences(dims)).eval()
        explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
        assert_close(explain_model(x), model(x), 1e-12)
        assert merge_stage(explain_model).reasons == reasons


class Between(nn.Module):
    """A convolution, a function of its result, and a batch norm."""

    def __init__(self, function, norm_dtype=None):
        super().__init__()
        self.layer, self.function = nn.Conv2d(3, 4, 3), function
        self.norm = randomize_batch_norm(nn.BatchNorm2d(4)).to(norm_dtype)

    def forward(self, x):
        return self.norm(self.function(self.layer(x)))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.to(y.dtype),
        lambda y: y.type_as(y),
        lambda y: y.to(y.device),
        lambda y: y.cpu(),
        lambda y: y.clone().contiguous(),
        lambda y: y.to(memory_format=torch.channels_last),
        lambda y: y * 1.0,
    ],
)
def test_what_changes_no_entry_is_known_without_example_inputs(function):
    model, x = Between(function).eval(), torch.randn(2, 3, 5, 5)
    explain_model = lrpfx.transform(model, EpsilonPlus(), capture="symbolic")
    assert merge_stage(explain_model).details == (("norm", "merged into layer"),)
    assert_close(explain_model(x), model(x), 1e-12)


def test_a_conversion_that_changes_the_dtype_stays():
    model, x = Between(lambda y: y.double(), torch.float64).eval(), torch.randn(2, 3, 5, 5, dtype=torch.float32)
    model.layer.float()
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert merge_stage(explain_model).matches == 0
    assert_close(explain_model(x), model(x), 1e-12)


@pytest.mark.parametrize("function", [lambda y: y.to(y.dtype), lambda y: y.type_as(y), lambda y: y.double()])
def test_a_merged_layer_behind_a_conversion_takes_another_dtype(function):
    """The conversion stays in the graph, so the module computes what the model computes in the other dtype."""
    model, x = Between(function).double().eval(), torch.randn(2, 3, 5, 5, dtype=torch.float64)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert merge_stage(explain_model).matches == 1
    other = explain_model.float()(x.float())
    assert other.dtype == function(torch.ones((), dtype=torch.float32)).dtype
    assert_close(other.double(), model(x), 1e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.roll(1),  # of all entries in their order
        lambda y: torch.nn.functional.pad(y, (1, 0)),
        lambda y: torch.nn.functional.pad(y, (1, 0), value=1.0),
        lambda y: y.tril(),
        lambda y: torch.cat([y, y], 2),
        lambda y: torch.nn.functional.avg_pool2d(y, 3, padding=1),  # over zeros, too
        lambda y: y[:, torch.tensor([0, 1, 2, 2])],  # the last channel is in none
        lambda y: y.transpose(1, 2)[:, :, :3].reshape(2, 4, 3, 3)[:, :, 1:],
        lambda y: torch.nn.functional.max_pool2d(y, 2),  # a negative scale makes the largest the smallest
        lambda y: torch.nn.functional.adaptive_max_pool2d(y, 2, return_indices=True)[0],
        lambda y: y.sort(2)[0],
        lambda y: y.topk(2, 3)[0],
    ],
)
def test_what_repeats_channels_adds_entries_or_depends_on_values_stays(function):
    model, x = Between(function).eval(), torch.randn(2, 3, 6, 5)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert merge_stage(explain_model).matches == 0 and merge_stage(explain_model).reasons
    assert_close(explain_model(x), model(x), 1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.flip(1),
        lambda y: y[:, torch.tensor([2, 0, 3, 1])].flip(1),
        lambda y: torch.nn.functional.channel_shuffle(y, 2),
        lambda y: y.view(y.shape[0], 2, 2, *y.shape[2:]).transpose(1, 2).reshape(y.shape).roll(1, 1),
        lambda y: torch.nn.functional.avg_pool2d(y.flip(1), 2),
        lambda y: torch.nn.functional.adaptive_avg_pool2d(y, 2),
        lambda y: torch.nn.functional.interpolate(y, scale_factor=2, mode="bicubic"),
        lambda y: y.mean((2, 3), keepdim=True),
    ],
)
def test_channels_in_another_order_and_averages_of_places(function):
    """Batch norm is merged into the layer before them, also with weights that are loaded later."""
    model, x = Between(function).eval(), torch.randn(2, 3, 6, 5)
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert merge_stage(explain_model).details == (("norm", "merged into layer"),)
    assert_close(explain_model(x), model(x), 1e-12)
    other = randomize_batch_norm(Between(function)).eval()
    explain_model.load_state_dict(other.state_dict())
    assert_close(explain_model(x), other(x), 1e-12)


def test_an_order_of_channels_that_may_be_loaded_stays():
    model, x = Between(lambda y: y[:, model.order]).eval(), torch.randn(2, 3, 6, 5)
    model.register_buffer("order", torch.tensor([2, 0, 3, 1]))
    explain_model = lrpfx.transform(model, EpsilonPlus(), example_inputs=x)
    assert merge_stage(explain_model).matches == 0
    explain_model.load_state_dict({**model.state_dict(), "order": torch.tensor([1, 2, 3, 0])})
    model.order.copy_(torch.tensor([1, 2, 3, 0]))
    assert_close(explain_model(x), model(x), 1e-12)
