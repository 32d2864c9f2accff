"""Metrics of Quantus give what they give for `lrpfx.attribute`. A model whose parameters a metric changes is compiled once."""

import copy
import time
import warnings

import numpy as np
import pytest
import torch
import torchvision
from helpers import assert_close, randomize_batch_norm
from torch import nn

import lrpfx
from lrpfx.adapters.quantus import explain_func
from lrpfx.composites import EpsilonPlus, EpsilonPlusFlat
from lrpfx.errors import CaptureError, InputError, InputTypeError

pytestmark = pytest.mark.programs

quantus = pytest.importorskip("quantus")
mosaic_creation = pytest.importorskip("quantus.functions.mosaic_func").mosaic_creation


class Network(nn.Module):
    """Merged batch norms in front of and behind their convolution, a skip connection and dropout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.second = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.hidden, self.head = nn.Linear(64, 12), nn.Linear(12, 5)

    def forward(self, x):
        x = self.bn(self.conv(x)).relu()
        x = nn.functional.max_pool2d(self.second(x) + x, 2)
        return self.head(self.drop(self.hidden(x.flatten(1)).relu()))


@pytest.fixture
def model():
    model = Network().eval()
    randomize_batch_norm(model)
    return model


@pytest.fixture
def data():
    generator = np.random.default_rng(0)
    masks = np.zeros((4, 1, 8, 8), bool)
    masks[:, :, 2:6, 2:6] = True
    return {"x_batch": generator.random((4, 1, 8, 8)), "y_batch": np.array([0, 3, 2, 1]), "s_batch": masks}


def fresh(model, inputs, targets, device=None):
    """An explanation function as one would write it: it compiles each time."""
    dtype = next(model.parameters()).dtype
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    return lrpfx.attribute(explain_model, torch.tensor(inputs).to(dtype), torch.tensor(targets)).relevance.numpy()


def scores(metric, model, data, function, **keywords):
    """What a metric gives, as an array."""
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of Quantus
        found = metric(model=model, a_batch=None, explain_func=function, **copy.deepcopy(data), **keywords)
    return np.array(list(found.values()) if isinstance(found, dict) else found, dtype=float)


METRICS = {
    "faithfulness, correlation": ("FaithfulnessCorrelation", {"nr_runs": 10, "subset_size": 8}),
    "faithfulness, flipping": ("PixelFlipping", {"features_in_step": 16}),
    "robustness, sensitivity": ("MaxSensitivity", {"nr_samples": 3}),
    "robustness, relative": ("RelativeInputStability", {"nr_samples": 3}),
    "localisation": ("RelevanceRankAccuracy", {}),
    "complexity": ("Sparseness", {}),
    "randomisation, logit": ("RandomLogit", {"num_classes": 5}),
    "randomisation, layers": ("MPRT", {}),
    "randomisation, at once": ("EfficientMPRT", {}),
    "axiomatic, completeness": ("NonSensitivity", {"features_in_step": 1}),
    "axiomatic, invariance": ("InputInvariance", {}),
}


@pytest.mark.parametrize(("name", "arguments"), METRICS.values(), ids=METRICS)
def test_metrics_give_what_they_give_for_attribute(compiled, model, data, name, arguments):
    def metric():
        return getattr(quantus, name)(disable_warnings=True, **arguments)

    found = scores(metric(), model, data, explain_func(EpsilonPlusFlat()), device="cpu")
    assert len(compiled) == 1
    np.testing.assert_allclose(found, scores(metric(), model, data, fresh), rtol=1e-6, atol=1e-6)
    assert np.isfinite(found).all() and found.size >= (1 if "Correlation" in name else 4)


@pytest.mark.parametrize("order", ["top_down", "bottom_up", "independent"])
def test_each_randomized_model_is_explained_as_by_a_fresh_graph(compiled, model, data, order):
    explain, found, expected = explain_func(EpsilonPlusFlat()), [], []

    def both(model, inputs, targets):
        found.append(torch.tensor(explain(model, inputs, targets)))
        expected.append(torch.tensor(fresh(model, inputs, targets)))
        return found[-1].numpy()

    state = copy.deepcopy(model.state_dict())
    scores(quantus.MPRT(layer_order=order, disable_warnings=True), model, data, both)
    layers = [path for path, module in model.named_modules() if hasattr(module, "reset_parameters")]
    assert len(found) == 2 + len(layers) == 9  # with the explanations of the model itself, of which there are two
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-10)
    assert len({one.numpy().tobytes() for one in found}) >= len(layers)
    assert len(compiled) == 1
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


@pytest.mark.slow
def test_randomizing_a_resnet_takes_seconds():
    torch.set_default_dtype(torch.float32)
    model = torchvision.models.resnet18(num_classes=10).eval()
    inputs, targets = np.random.default_rng(0).standard_normal((2, 3, 64, 64)).astype(np.float32), np.array([1, 2])

    def seconds():
        metric, explain = quantus.MPRT(layer_order="top_down", disable_warnings=True), explain_func(EpsilonPlusFlat())
        start = time.process_time()
        found = metric(model=model, x_batch=inputs, y_batch=targets, a_batch=None, explain_func=explain)
        assert len(found) == 42
        return time.process_time() - start

    assert any(seconds() <= 5 for _ in range(3)), "three times"  # another process may have been in its way


def test_what_quantus_explains_itself_is_not_lrp(model, data):
    """SmoothMPRT of Quantus 0.6 does not call the function that it is given, as the guide says."""
    called = []

    def explain(model, inputs, targets):
        called.append(model)
        return fresh(model, inputs, targets)

    scores(quantus.SmoothMPRT(nr_samples=2, disable_warnings=True), model, data, explain)
    assert not called


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("IROF", {}, AttributeError, "trapz"),
        ("PixelFlipping", {"features_in_step": 16, "return_auc_per_sample": True}, AttributeError, "trapz"),
        ("NonSensitivity", {"features_in_step": 8}, ValueError, "broadcast"),
    ],
)
def test_what_fails_in_quantus_fails_for_any_function(model, data, name, arguments, error, message):
    """The guide lists these defects of Quantus 0.6 with NumPy 2.4."""
    for function in (fresh, explain_func(EpsilonPlusFlat())):
        with pytest.raises(error, match=message):
            scores(getattr(quantus, name)(disable_warnings=True, **arguments), model, data, function)


#: Arguments of metrics for small images.
ARGUMENTS = {
    "Continuity": {"nr_steps": 3},
    "FaithfulnessCorrelation": {"nr_runs": 5, "subset_size": 8},
    "FaithfulnessEstimate": {"features_in_step": 16},
    "Infidelity": {"perturb_patch_sizes": [2], "n_perturb_samples": 2},
    "Monotonicity": {"features_in_step": 16},
    "MonotonicityCorrelation": {"features_in_step": 16, "nr_samples": 2},
    "NonSensitivity": {"features_in_step": 1},
    "PixelFlipping": {"features_in_step": 16},
    "RandomLogit": {"num_classes": 5},
    "RegionPerturbation": {"patch_size": 2, "regions_evaluation": 4},
    "Selectivity": {"patch_size": 2},
    "SensitivityN": {"features_in_step": 16},
    "TopKIntersection": {"k": 10},
    **{name: {"nr_samples": 2} for name in ("AvgSensitivity", "LocalLipschitzEstimate", "MaxSensitivity")},
    **{f"Relative{of}Stability": {"nr_samples": 2} for of in ("Input", "Output", "Representation")},
}
ALL = {cls.__name__: cls for classes in quantus.AVAILABLE_METRICS.values() for cls in classes.values()}
#: Metrics that do not run on photographs with Quantus 0.6, whatever explains them, and why: the guide says so.
BROKEN = {"IROF": "shape of arr must be the same", "ROAD": "out of bounds"}
#: Metrics that compare relevance with a mask of one channel.
OF_MASKS = {
    "AUC",
    "AttributionLocalisation",
    "PointingGame",
    "RelevanceMassAccuracy",
    "RelevanceRankAccuracy",
    "TopKIntersection",
}


@pytest.fixture(scope="module")
def of_colours():
    """A network for images of three channels, and images with their classes and masks."""
    generator = np.random.default_rng(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)]
    masks = np.zeros((4, 1, 8, 8), bool)
    masks[:, :, 2:6, 2:6] = True
    data = {"x_batch": generator.random((4, 3, 8, 8)), "y_batch": np.array([0, 3, 2, 1]), "s_batch": masks}
    return nn.Sequential(*layers).double().eval(), data


@pytest.mark.parametrize("name", sorted(set(ALL) - {"Focus"}))  # Focus takes mosaics
def test_all_metrics_on_images_with_three_channels(of_colours, name):
    model, data = of_colours

    def run(**settings):
        metric = ALL[name](disable_warnings=True, **ARGUMENTS.get(name, {}))
        return scores(metric, model, data, explain_func(EpsilonPlusFlat(), **settings), device="cpu")

    if name in BROKEN:
        for summed in (False, True):
            with pytest.raises((AssertionError, IndexError), match=BROKEN[name]):
                run(sum_channels=summed)
        return
    assert np.isfinite(run(sum_channels=True)).all()
    if name in OF_MASKS:
        with pytest.raises((IndexError, ValueError)):
            run()
    else:
        assert np.isfinite(run()).all()


def test_focus_on_mosaics(of_colours):
    model, data = of_colours
    mosaics, _, _, positions, targets = mosaic_creation(
        images=data["x_batch"], labels=np.array([0, 1, 0, 1]), mosaics_per_class=2, seed=0
    )
    network = nn.Sequential(nn.AvgPool2d(2), model).eval()  # mosaics are twice as high and wide
    found = quantus.Focus(disable_warnings=True)(
        model=network,
        x_batch=mosaics,
        y_batch=targets,
        custom_batch=positions,
        explain_func=explain_func(EpsilonPlusFlat()),
    )
    assert len(found) == len(mosaics) and np.isfinite(np.array(found, float)).all()


def test_evaluate_of_quantus(of_colours):
    model, data = of_colours
    explain = explain_func(EpsilonPlusFlat(), sum_channels=True)
    metrics = {"pointing": quantus.PointingGame(disable_warnings=True), "sparse": quantus.Sparseness(disable_warnings=True)}
    found = quantus.evaluate(metrics, {"LRP": explain}, model, **data, explain_func_kwargs={"device": "cpu"})
    expected = {name: scores(metric, model, data, explain, device="cpu") for name, metric in metrics.items()}
    for name in metrics:
        np.testing.assert_allclose(np.array(found["LRP"][name], float), expected[name], rtol=1e-9)


def test_channels_are_summed(of_colours):
    model, data = of_colours
    each = explain_func(EpsilonPlusFlat())(model, data["x_batch"], data["y_batch"])
    summed = explain_func(EpsilonPlusFlat(), sum_channels=True)(model, data["x_batch"], data["y_batch"])
    np.testing.assert_allclose(summed, each.sum(1, keepdims=True), rtol=1e-12)
    with pytest.raises(InputError, match="sum_channels=True is for inputs with channels"):
        explain_func(EpsilonPlusFlat(), sum_channels=True)(nn.Linear(3, 2).double().eval(), np.ones((2, 3)), 0)


def test_a_module_with_rules_is_explained_but_not_randomized(compiled, model, data):
    explain_model = lrpfx.transform(model, EpsilonPlusFlat())
    found = scores(quantus.Sparseness(disable_warnings=True), explain_model, data, explain_func())
    np.testing.assert_allclose(found, scores(quantus.Sparseness(disable_warnings=True), model, data, fresh), rtol=1e-9)
    assert not compiled

    def own(model, inputs, targets):
        return lrpfx.attribute(model, torch.tensor(inputs), torch.tensor(targets)).relevance.numpy()

    for function in (explain_func(), own):
        for metric in (quantus.MPRT(disable_warnings=True), quantus.EfficientMPRT(disable_warnings=True)):
            with pytest.raises(InputError, match=r"randomize the source model.*lrpfx\.adapters\.quantus\.explain_func"):
                scores(metric, explain_model, data, function)


def test_the_composite_may_be_left_out(model, data):
    explainer = lrpfx.Explainer(model)
    explainer(torch.tensor(data["x_batch"]))
    expected = lrpfx.attribute(explainer.explain_model, torch.tensor(data["x_batch"]), data["y_batch"]).relevance
    assert_close(torch.tensor(explain_func()(model, data["x_batch"], data["y_batch"])), expected, 1e-12)


def kinds_of_inputs():
    """Arrays with the same numbers."""
    numbers = np.random.default_rng(1).integers(1, 5, (4, 1, 8, 8))
    read_only = numbers.astype(float)
    read_only.flags.writeable = False
    yield from {
        "integers": numbers,
        "bytes": numbers.astype(np.uint8),
        "half": numbers.astype(np.float16),
        "read-only": read_only,
        "reversed": np.ascontiguousarray(numbers[::-1, :, ::-1])[::-1, :, ::-1].astype(float),
        "a view with negative strides": numbers[::-1].copy()[::-1],
        "of Fortran": np.asfortranarray(numbers.astype(float)),
        "big-endian": numbers.astype(">f8"),
        "a tensor": torch.tensor(numbers, dtype=torch.float64, requires_grad=True),
    }.items()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("inputs", [pytest.param(inputs, id=name) for name, inputs in kinds_of_inputs()])
def test_arrays_of_all_kinds(model, inputs):
    expected = fresh(model, next(kinds_of_inputs())[1].astype(float), [0, 1, 2, 3])
    found = explain_func(EpsilonPlusFlat())(model, inputs, np.array([0, 1, 2, 3]), device="cpu")
    assert type(found) is np.ndarray and found.dtype == np.float64 and found.flags.writeable
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize(
    "targets", [2, [2, 2, 2, 2], np.array([2] * 4, np.uint8), torch.tensor([2] * 4), np.int64(2)], ids=repr
)
def test_targets_of_all_kinds(model, data, targets):
    expected = fresh(model, data["x_batch"], [2] * 4)
    np.testing.assert_allclose(explain_func(EpsilonPlusFlat())(model, data["x_batch"], targets), expected, rtol=1e-10)


def test_single_samples_are_explained_as_in_a_batch(compiled, model, data):
    explain = explain_func(EpsilonPlusFlat())
    expected = explain(model, data["x_batch"], data["y_batch"])
    for sample in range(4):
        one = explain(model, data["x_batch"][sample : sample + 1], data["y_batch"][sample : sample + 1])
        np.testing.assert_allclose(one, expected[sample : sample + 1], rtol=1e-10)
    assert len(compiled) == 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_other_dtypes_give_single_precision(model, data, dtype, tolerance):
    expected = torch.tensor(explain_func(EpsilonPlus())(model, data["x_batch"], 1))
    found = explain_func(EpsilonPlus())(model.to(dtype), data["x_batch"], 1)
    assert found.dtype == np.float32
    assert_close(torch.tensor(found).double(), expected, tolerance)


def test_a_model_in_training_mode_is_an_error(model, data):
    with pytest.raises(CaptureError, match=r"Call model\.eval\(\) first"):
        explain_func(EpsilonPlus())(model.train(), data["x_batch"], data["y_batch"])


WRONG = [
    ({"inputs": [[1.0]]}, InputTypeError, "inputs are an array, not list"),
    ({"inputs": np.array(["a"])}, InputTypeError, "inputs are an array of numbers, not of dtype <U1"),
    ({"inputs": np.ones((4, 1, 8, 8), complex)}, InputTypeError, "inputs are an array of numbers"),
    ({"inputs": np.array(1.0)}, InputError, "samples in dimension 0, not one number"),
    ({"targets": None}, InputTypeError, "targets are ints, not NoneType"),
    ({"targets": [0.5, 1, 2, 3]}, InputTypeError, "targets are ints, not torch.float64"),
    ({"targets": [True] * 4}, InputTypeError, "targets are ints, not torch.bool"),
    ({"targets": [0, 1]}, InputError, r"targets have shape \(2,\), but there are 4 samples"),
    ({"targets": [[0, 1]]}, InputError, r"targets have shape \(1, 2\)"),
    ({"targets": 5}, InputError, "target 5 is out of range"),
    ({"device": "meta"}, InputError, r"the device is meta, but the model is on cpu: move it by model\.to\('meta'\)"),
    ({"device": "gpu"}, InputError, "the device 'gpu' cannot be used: RuntimeError"),
    ({"xai_lib": "captum"}, InputTypeError, "there is no argument 'xai_lib'"),
    ({"model": lambda x: x}, InputTypeError, r"explain_func takes a torch\.nn\.Module, not function"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_what_cannot_be_explained_is_an_error(model, data, arguments, error, message):
    given = {"model": model, "inputs": data["x_batch"], "targets": data["y_batch"], **arguments}
    with pytest.raises(error, match=message):
        explain_func(EpsilonPlusFlat())(**given)
