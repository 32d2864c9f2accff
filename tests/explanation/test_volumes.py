"""Volumes and videos through the front door: the relevance is that of `attribute`, and pictures show the slices they name."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which needs it with a CPU build of torch
from helpers import assert_close
from PIL import Image
from torch import nn
from torchvision.models import video

import lrpfx
from lrpfx.composites import AttnLRP, GammaByDepth
from lrpfx.errors import InputError, InputTypeError


def classifier(channels=1):
    torch.manual_seed(0)
    layers = nn.Conv3d(channels, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(32, 3)
    return nn.Sequential(*layers).eval()


class UNet(nn.Module):
    """One step down and one up, with a skip connection."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 8, 3, stride=2, padding=1)
        self.up, self.norm = nn.ConvTranspose3d(8, 4, 2, stride=2), nn.BatchNorm3d(4)
        self.head = nn.Conv3d(8, 3, 1)

    def forward(self, x):
        skip = self.first(x).relu()
        inner = nn.functional.max_pool3d(self.inner(skip).relu(), 1)
        wide = nn.functional.interpolate(inner, scale_factor=1.0, mode="trilinear")
        return self.head(torch.cat([skip, self.norm(self.up(wide))], 1))


def test_the_relevance_is_that_of_attribute():
    model, volumes = classifier(2), torch.rand(2, 2, 6, 8, 10)
    explainer = lrpfx.Explainer(model, categories=["a", "b", "c"])
    found = explainer(volumes, ["a", "c"])
    direct = lrpfx.attribute(explainer.explain_model, volumes, [0, 2])
    assert isinstance(found, lrpfx.VolumeExplanations) and found[1].name == "volume 1"
    for place, one in enumerate(found):
        assert_close(torch.from_numpy(one.input_relevance), direct.relevance[place], 1e-6)
        np.testing.assert_allclose(one.relevance, direct.relevance[place].double().sum(0), rtol=1e-5, atol=1e-8)
        assert one.target.score == pytest.approx(float(direct.output[place, [0, 2][place]]), rel=1e-5)
        assert one.ledger.unexplained == pytest.approx(0, abs=1e-5)
    alone = explainer(volumes[1], targets=["a", "c"])
    assert alone.name == "volume" and [one.category.name for one in alone.answers] == ["a", "c"]
    np.testing.assert_allclose(alone.answers[1].input_relevance, found[1].input_relevance, rtol=1e-4, atol=1e-7)
    assert "GammaByDepth" in found[0].rules and list(found.to_pandas()["explained"]) == ["a", "c"]


def test_sizes_of_a_list_may_differ():
    model = classifier()
    found = lrpfx.explain(model, [torch.rand(1, 6, 8, 10), torch.rand(7, 5, 9)])
    assert [one.relevance.shape for one in found] == [(6, 8, 10), (7, 5, 9)]


def test_a_region_of_a_volume():
    torch.manual_seed(1)
    model, volume = UNet().eval(), torch.rand(1, 8, 8, 12)
    explainer = lrpfx.Explainer(model, categories=["ground", "organ", "lesion"])
    mask = torch.zeros(8, 8, 12)
    mask[2:5, 2:6, 3:9] = 1
    found = explainer(volume, lrpfx.Region("lesion", mask=mask, positive=False))
    seed = model(volume[None]).detach() * mask * torch.tensor([0.0, 0, 1])[:, None, None, None]
    direct = lrpfx.attribute(explainer.explain_model, volume[None], seed)
    assert_close(torch.from_numpy(found.input_relevance), direct.relevance[0], 1e-6)
    assert found.target.score == pytest.approx(float(seed.sum()), rel=1e-5) and found.target.area == pytest.approx(72 / 768)
    outlined, plain = found.overlay(3), found.overlay(6)
    assert is_outlined(outlined) and not is_outlined(plain)
    predicted = explainer(volume, "organ")
    assert predicted.target.area == pytest.approx(float((model(volume[None])[0].argmax(0) == 1).double().mean()))


def test_a_mask_of_voxels_for_an_output_of_other_size():
    torch.manual_seed(1)
    model, volume = nn.Conv3d(1, 3, 3, stride=2, padding=1).eval(), torch.rand(1, 8, 8, 12)
    mask = torch.zeros(8, 8, 12)
    mask[2:6, 2:6, 4:10] = 1
    explainer = lrpfx.Explainer(model)
    found = explainer(volume, lrpfx.Region(2, mask, positive=False))
    seed = model(volume[None]).detach() * mask[::2, ::2, ::2] * torch.tensor([0.0, 0, 1])[:, None, None, None]
    direct = lrpfx.attribute(explainer.explain_model, volume[None], seed)
    assert_close(torch.from_numpy(found.input_relevance), direct.relevance[0], 1e-6)
    with pytest.raises(lrpfx.InputError, match="places of the output"):
        explainer(volume, lrpfx.Region(2, mask[1:]))


def is_outlined(picture):
    return (np.asarray(picture) == (255, 214, 10)).all(-1).any()


def small_swin(num_classes):
    sizes = {"embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": [2, 2, 2]}
    return video.SwinTransformer3d(patch_size=[2, 4, 4], num_classes=num_classes, **sizes)


@pytest.mark.parametrize(
    ("make", "shape", "composite"),
    [
        pytest.param(video.r3d_18, (3, 4, 32, 32), GammaByDepth, id="r3d_18", marks=pytest.mark.thorough),
        pytest.param(video.swin3d_t, (3, 4, 64, 64), AttnLRP, id="swin3d_t", marks=pytest.mark.thorough),
        pytest.param(small_swin, (3, 4, 16, 16), AttnLRP, id="a small Video Swin"),
    ],
)
def test_videos(make, shape, composite):
    torch.manual_seed(0)
    model, clip = make(num_classes=5).eval(), torch.rand(shape)
    explainer = lrpfx.Explainer(model)
    found = explainer(clip, 2)
    assert isinstance(found, lrpfx.VolumeExplanation) and found.rules.startswith(composite.__name__)
    assert found.relevance.shape == shape[1:]
    output = model(clip[None])[0].detach()
    np.testing.assert_allclose(found.output, output, rtol=1e-4, atol=1e-5)
    assert found.target.probability == pytest.approx(float(output.softmax(0)[2]), rel=1e-3)
    assert abs(found.ledger.unexplained) < 1e-3 * abs(found.ledger.seed)
    assert found.sheet().width == 1200


def test_a_video_with_frames_in_front_of_channels():
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 16, "patch_size": 8, "num_frames": 4, "hidden_size": 16, "intermediate_size": 16}
    config = transformers.VideoMAEConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    model, clip = transformers.VideoMAEForVideoClassification(config).double().eval(), torch.rand(4, 3, 16, 16)
    explainer = lrpfx.Explainer(model)
    found = explainer(clip, 1)
    direct = lrpfx.attribute(explainer.explain_model, clip[None], 1).relevance[0]
    np.testing.assert_allclose(found.relevance, direct.sum(1), rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(found.volume, clip.transpose(0, 1))
    assert found.balance.inputs == pytest.approx(float(direct.sum())) and found.sheet().width == 1200


def test_slices_are_drawn_as_arrays_or_turned_by_the_affine():
    explanation = lrpfx.explain(classifier(), torch.rand(1, 6, 8, 10))
    marked = np.zeros((1, 6, 8, 10), dtype=np.float32)
    marked[0, 1, 2, 3] = 1
    assert place_of_mark(with_relevance(explanation, marked)) == pytest.approx((3.5 / 10, 2.5 / 8), abs=0.03)
    # the axes of voxels run to the patient's feet, right and back: those of an axial slice are the second and third
    affine = np.array([[0, 2.0, 0, 0], [0, 0, -1, 0], [-3, 0, 0, 0], [0, 0, 0, 1]])
    turned = with_relevance(explanation, marked, affine)
    assert turned.spacing == (3.0, 2.0, 1.0) and turned.most_relevant == (1, 2, 3)
    assert place_of_mark(turned) == pytest.approx((2.5 / 8, 3.5 / 10), abs=0.03), "the front is above, the right on the right"
    coronal = turned.overlay(axis=2)
    assert coronal.width / coronal.height == pytest.approx(8 * 2 / (6 * 3), rel=0.02)
    assert place_of_mark(turned, axis=2) == pytest.approx((2.5 / 8, 1.5 / 6), abs=0.03)
    assert place_of_mark(turned, axis=1) == pytest.approx((1 - 3.5 / 10, 1.5 / 6), abs=0.03), "the front on the right"


def with_relevance(explanation, relevance, affine=None):
    answers = tuple(replace(one, input_relevance=relevance) for one in explanation.answers)
    return replace(explanation, answers=answers, affine=affine)


def place_of_mark(explanation, axis=None):
    """The middle of what is red, as shares of width and height."""
    picture = np.asarray(explanation.overlay(axis=axis)).astype(int)
    rows, columns = np.nonzero(picture[..., 0] - picture[..., 2] > 100)
    return columns.mean() / picture.shape[1], rows.mean() / picture.shape[0]


def test_pictures_have_one_scale_and_the_most_relevant_slice():
    found = lrpfx.explain(classifier(), torch.rand(1, 20, 8, 10))
    assert found.most_relevant[0] in found._places(6, 0) and len(set(found._places(6, 0))) == 6
    assert found._places(99, 0) == list(range(20))
    assert found._scaled(lrpfx.pictures.Style()).scale == pytest.approx(
        lrpfx.pictures.scale_of(list(found.relevance), sigma=None)
    )
    sheets = found.sheet(), found.montage(9, columns=3), found.planes(), found.planes((0, 1, 2)), found.montage(4, axis=2)
    assert all(one.width == 1200 for one in sheets)


def test_files(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    model = classifier()
    values = np.random.default_rng(0).random((6, 8, 10), dtype=np.float32)
    affine = np.diag([2.0, 2.0, 3.0, 1.0])
    affine[:3, 3] = 5, -7, 9
    path = tmp_path / "head.nii.gz"
    nibabel.save(nibabel.Nifti1Image(values, affine), path)
    found = lrpfx.explain(model, path)
    assert found.name == "head.nii.gz" and found.spacing == (2.0, 2.0, 3.0)
    expected = lrpfx.explain(model, values)
    np.testing.assert_allclose(found.relevance, expected.relevance, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(lrpfx.explain(model, nibabel.load(path)).affine, affine)

    written = nibabel.load(found.save(tmp_path / "relevance.nii.gz"))
    np.testing.assert_array_equal(written.affine, affine)
    np.testing.assert_allclose(written.get_fdata(), found.relevance, rtol=1e-6, atol=1e-9)
    both = lrpfx.explain(model, path, targets=[0, 1])
    assert nibabel.load(both.save(tmp_path / "both.nii")).shape == (6, 8, 10, 2)
    with pytest.raises(InputError, match="affine="):
        expected.save(tmp_path / "nowhere.nii")
    assert nibabel.load(expected.save(tmp_path / "there.nii", affine=affine)).shape == (6, 8, 10)
    with np.load(found.save(tmp_path / "figures.npz")) as figures:
        np.testing.assert_array_equal(figures["affine"], affine)
    several = lrpfx.explain(model, [path, path])
    assert [one.name for one in several.save(tmp_path / "folder")] == ["head.png", "head_2.png"]

    damaged = tmp_path / "damaged.nii.gz"
    damaged.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:500]))
    with pytest.raises(InputError, match=r"damaged\.nii\.gz cannot be read"):
        lrpfx.explain(model, damaged)
    with pytest.raises(InputError, match=r"missing\.nii cannot be read"):
        lrpfx.explain(model, tmp_path / "missing.nii")


class Located(torch.Tensor):
    """A tensor with an affine, as MONAI has it."""

    affine = torch.diag(torch.tensor([4.0, 4.0, 4.0, 1.0]))


def test_a_network_and_transforms_of_monai(tmp_path):
    """The relevance is saved where the transforms have moved the voxels."""
    nibabel, transforms = pytest.importorskip("nibabel"), pytest.importorskip("monai.transforms")
    networks = pytest.importorskip("monai.networks.nets")
    affine = np.diag([-2.0, 2.0, 3.0, 1.0])
    values = np.random.default_rng(0).random((20, 18, 16), dtype=np.float32)
    nibabel.save(nibabel.Nifti1Image(values, affine), tmp_path / "scan.nii.gz")
    preprocess = transforms.Compose(
        [
            transforms.LoadImage(ensure_channel_first=True),
            transforms.Orientation("RAS", labels=None),
            transforms.Spacing((2.0, 2.0, 2.0)),
            transforms.ResizeWithPadOrCrop((16, 16, 24)),
        ]
    )
    model = networks.UNet(3, 1, 3, (4, 8, 16), (2, 2), num_res_units=2).float().eval()
    found = lrpfx.explain(model, tmp_path / "scan.nii.gz", 1, preprocess=preprocess)
    prepared = preprocess(tmp_path / "scan.nii.gz")
    np.testing.assert_array_equal(found.volume, prepared.numpy())
    np.testing.assert_allclose(found.output, model(prepared.as_tensor()[None])[0].detach(), rtol=1e-4, atol=1e-5)
    saved = nibabel.load(found.save(tmp_path / "relevance.nii.gz"))
    np.testing.assert_allclose(saved.affine, prepared.affine, atol=1e-6)
    assert found.spacing == pytest.approx((2, 2, 2)) and abs(found.ledger.unexplained) < 1e-4 * abs(found.ledger.seed)

    whole = found.on_scan()
    np.testing.assert_array_equal(whole.volume[0], values)
    np.testing.assert_array_equal(nibabel.load(whole.save(tmp_path / "whole.nii.gz")).affine, affine)
    world = [one.affine @ (*one.most_relevant, 1) for one in (found, whole)]
    assert np.abs(world[0] - world[1])[:3].max() <= 3.0, "the largest voxel lies at the same place in millimetres"


def test_preprocessing_is_of_one_volume():
    model, files = classifier(), [torch.rand(1, 12, 8, 8), torch.rand(1, 10, 8, 8)]
    found = lrpfx.explain(model, files, preprocess=lambda one: one[:, ::2].as_subclass(Located))
    assert [one.relevance.shape for one in found] == [(6, 8, 8), (5, 8, 8)] and found[0].spacing == (4.0, 4.0, 4.0)
    assert type(found[0].volume) is np.ndarray
    assert lrpfx.explain(model, files, preprocess=lambda one: one[:, ::2])[0].affine is None


class Weighted(nn.Module):
    """The sum of all voxels, so that each has its value as relevance, by a convolution of volumes."""

    def __init__(self):
        super().__init__()
        self.whole = nn.Conv3d(1, 1, 1, bias=False)
        nn.init.ones_(self.whole.weight)

    def forward(self, x):
        return self.whole(x).sum((2, 3, 4))


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.uint8, np.float32])
def test_what_preprocessing_did_to_the_axes_is_undone(kind):
    """A crop, a flip, another order of axes, a mean over pairs and zeros around."""
    generator = np.random.default_rng(0)
    smooth = generator.random((6, 5, 4)).repeat(4, 0).repeat(4, 1).repeat(4, 2)  # (24, 20, 16)
    scan = torch.from_numpy(smooth) if isinstance(kind, torch.dtype) else smooth.astype(kind)
    scan = (255 * scan).round().to(kind) if kind is torch.uint8 else scan.to(kind) if isinstance(kind, torch.dtype) else scan

    def preprocess(values):
        part = torch.as_tensor(values)[4:20, :, 2:14].flip(1).permute(2, 0, 1).double()
        pooled = nn.functional.avg_pool3d(part[None, None], (1, 2, 1))[0]
        return nn.functional.pad(pooled, (3, 0), value=0.0)

    found = lrpfx.explain(Weighted().double().eval(), scan, 0, preprocess=preprocess, composite="epsilon_plus")
    assert found.relevance.shape == (12, 8, 23)
    whole = found.on_scan()
    assert whole.relevance.shape == whole.volume.shape[1:] == (24, 20, 16)
    expected = np.zeros((24, 20, 16))
    values = np.asarray(scan, dtype=np.float64)[4:20, :, 2:14]
    expected[4:20, :, 2:14] = values.reshape(8, 2, 20, 12).mean(1).repeat(2, 0) / 2
    np.testing.assert_allclose(whole.relevance, expected, rtol=2e-2, atol=1e-2 * expected.max())
    assert whole.balance.inputs == pytest.approx(found.balance.inputs, rel=1e-6)
    assert whole.planes().size[0] > 100 and abs(whole.ledger.unexplained) < 1e-6 * abs(whole.ledger.seed)
    with pytest.raises(InputError, match="scan"):
        whole.on_scan()


@pytest.mark.parametrize("shape", [(8, 10, 12), (7, 9, 11), (16, 20, 24)])
def test_half_of_a_small_scan(shape):
    """Cells of the comparison hold some voxels of the input, however few there are."""
    scan = nn.functional.interpolate(torch.rand(1, 1, 3, 4, 3), size=shape, mode="trilinear")[0, 0]

    def half(one):
        return nn.functional.interpolate(one[None, None], scale_factor=0.5, mode="trilinear")[0]

    found = lrpfx.explain(Weighted().eval(), scan, 0, preprocess=half)
    whole = found.on_scan()
    assert whole.relevance.shape == shape
    assert whole.relevance.sum() == pytest.approx(found.relevance.sum(), rel=1e-5)
    if not any(size % 2 for size in shape):
        expected = found.relevance.repeat(2, 0).repeat(2, 1).repeat(2, 2) / 8
        np.testing.assert_allclose(whole.relevance, expected, rtol=1e-5, atol=1e-8)


def test_a_mask_of_the_scan():
    """It moves with the scan through a crop, a flip, another order of axes and a halving; one of no known size is an error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, 1)).eval()
    scan, mask = torch.rand(16, 12, 14), np.zeros((16, 12, 14), bool)
    scan = nn.functional.avg_pool3d(scan[None, None], 3, 1, 1)[0, 0]
    mask[6:12, 2:6, 4:10] = True

    def preprocess(one):
        part = torch.as_tensor(one)[4:].flip(1).permute(2, 0, 1).float()
        return nn.functional.avg_pool3d(part[None], 2)

    moved = preprocess(mask)[0].numpy() > 0.5
    explainer = lrpfx.Explainer(model, preprocess=preprocess)
    found, expected = (explainer(scan, lrpfx.Region(1, one, positive=False)) for one in (mask, moved))
    assert moved.sum() == 3 * 3 * 2
    np.testing.assert_array_equal(found.answers[0].region, moved)
    np.testing.assert_array_equal(found.relevance, expected.relevance)
    np.testing.assert_array_equal(found.on_scan().answers[0].region, mask)
    with pytest.raises(InputError, match="of the scan where what"):
        lrpfx.explain(model, scan, lrpfx.Region(1, mask), preprocess=lambda one: preprocess(one) + torch.rand(1))


@pytest.mark.parametrize(
    "preprocess",
    [
        lambda one: one + 1e-3 * torch.rand_like(one),
        lambda one: one.rot90(1, (2, 3)) @ torch.rand(10, 10).tril(),
        lambda one: one.cumsum(3),
        lambda one: one.roll(int(100 * one.std()), 1),
        lambda one: ((one - one.mean()) / one.std()).roll(int(100 * one.std()), 1),
        lambda one: ((one - one.mean()) / one.std()).cumsum(2),
        lambda one: nn.functional.pad(one[..., 3:], (3, 0)),
    ],
    ids=["random", "mixed", "summed", "by content", "standardized by content", "standardized sums", "cut and filled up"],
)
def test_other_preprocessing_is_not_undone(preprocess):
    found = lrpfx.explain(classifier(), torch.rand(1, 8, 10, 10), 1, preprocess=preprocess)
    with pytest.raises(InputError, match="crops, scales"):
        found.on_scan()


def of_zero_mean(values):
    return (values - values.mean()) / values.std()


def of_zero_mean_but_background(values):
    found = values.copy()
    found[values > 0] = of_zero_mean(values[values > 0])
    return found


def of_percentiles(values):
    low, high = np.percentile(values, [2, 98])
    return ((values - low) / (high - low)).clip(0, 1)


@pytest.mark.filterwarnings("ignore::lrpfx.errors.LrpfxWarning")  # the map is not determined: the sum of all values is 0
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("values_of", [of_zero_mean, of_zero_mean_but_background, of_percentiles])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16])
def test_volumes_that_are_standardized_by_themselves(values_of, dtype):
    """Crops, mirrored and reordered axes, padding and a halving, before the standardization and after it."""
    generator = np.random.default_rng(0)
    scan = generator.random((6, 5, 4)).repeat(4, 0).repeat(4, 1).repeat(4, 2)  # (24, 20, 16)
    scan[:7], scan[:, :5] = 0, 0  # background
    scan = (1000 * scan).round().astype(dtype)

    def standardized(values):
        return values_of(values.astype(np.float64 if dtype == np.float64 else np.float32))

    def half(values):
        return values.reshape(12, 2, 10, 2, 8, 2).mean((1, 3, 5))

    ways = {
        "crop after": (lambda one: standardized(one)[4:20, :, 2:14], (4, 0, 2), (1, 1, 1)),
        "crop before": (lambda one: standardized(one[4:20, :, 2:14]), (4, 0, 2), (1, 1, 1)),
        "mirrored": (lambda one: np.ascontiguousarray(standardized(one)[:, ::-1]), (0, 20, 0), (1, -1, 1)),
        "half": (lambda one: half(standardized(one)), (0, 0, 0), (2, 2, 2)),
        "padded": (lambda one: np.pad(standardized(one), ((3, 1), (0, 0), (2, 0))), (-3, 0, -2), (1, 1, 1)),
        "padded before": (lambda one: standardized(np.pad(one, ((3, 1), (0, 0), (2, 0)))), (-3, 0, -2), (1, 1, 1)),
        "padded on one side before": (lambda one: standardized(np.pad(one, ((0, 0), (9, 0), (0, 5)))), (0, -9, 0), (1, 1, 1)),
        "padded with another value before": (
            lambda one: standardized(np.pad(one, 3, constant_values=400)),
            (-3, -3, -3),
            (1, 1, 1),
        ),
    }
    if values_of is not of_zero_mean_but_background:  # which makes the lowest values of voxels that mix background and body
        ways["half, cropped and padded before"] = (
            lambda one: standardized(np.pad(half(one)[:, 2:], ((3, 1), (0, 0), (2, 2)))),
            (-6, 4, -4),
            (2, 2, 2),
        )
    for name, (preprocess, starts, steps) in ways.items():
        found = lrpfx.explain(Weighted().to(torch.float64), scan, 0, preprocess=lambda one, of=preprocess: of(one)[None])
        axes = found.scan.geometry.axes
        assert [axis.start for axis in axes] == pytest.approx(starts, abs=0.02), name
        assert [axis.step for axis in axes] == pytest.approx(steps, abs=0.003), name
        assert found.on_scan().relevance.shape == scan.shape
    turned = lrpfx.explain(Weighted(), scan, 0, preprocess=lambda one: standardized(one).transpose(2, 0, 1).astype(np.float32))
    assert turned.scan.geometry.order == (2, 0, 1)


@pytest.mark.parametrize("window", [(-500, 500), (-160, 240), (900, 1000)])
def test_a_window_of_values(window):
    """As of computed tomography: values outside of it are cut off, which no ramp over all values shows."""
    places = np.meshgrid(*(np.linspace(0, end, count) for end, count in ((3, 16), (4, 20), (5, 24))), indexing="ij")
    scan = (1000 * np.sin(places[0] + places[1]) * np.cos(places[2])).astype(np.int16)
    low, high = window

    def preprocess(values):
        shown = (torch.as_tensor(values.astype(np.float32)).clamp(low, high) - low) / (high - low)
        return nn.functional.interpolate(shown[None, None, 4:, :, 2:22], scale_factor=(1, 0.5, 0.5), mode="trilinear")[0]

    found = lrpfx.explain(Weighted().eval(), scan, 0, preprocess=preprocess)
    whole = found.on_scan()
    expected = np.zeros(scan.shape)
    expected[4:, :, 2:22] = found.relevance.repeat(2, 1).repeat(2, 2) / 4
    np.testing.assert_allclose(whole.relevance, expected, rtol=1e-2, atol=2e-2 * expected.max())
    assert whole.relevance.sum() == pytest.approx(found.relevance.sum(), rel=1e-3)


def test_preprocessing_is_measured_once_for_each_size():
    calls = []

    def preprocess(scan):
        calls.append(scan.shape)
        return scan[:, ::2]

    explainer = lrpfx.Explainer(classifier(), preprocess=preprocess)
    smooth = torch.linspace(0, 1, 12)[:, None, None] + torch.rand(3, 1, 1, 4, 4)
    first = explainer(smooth[0])
    before = len(calls)
    again = explainer(list(smooth[1:]))
    assert len(calls) - before == 2 * 2 < before
    assert first.on_scan().relevance.shape == again[1].on_scan().relevance.shape == (12, 4, 4)


def test_frames_of_a_video_in_their_own_size():
    frames = torch.randint(0, 256, (8, 3, 6, 5), dtype=torch.uint8).repeat_interleave(4, 2).repeat_interleave(4, 3)

    def preprocess(clip):  # as transforms of torchvision: resized, cropped, with channels in front
        resized = nn.functional.interpolate(clip.float() / 255, scale_factor=0.5, mode="bilinear", antialias=True)
        return ((resized[:, :, 1:11, :] - 0.45) / 0.225).transpose(0, 1)

    found = lrpfx.explain(classifier(3), frames, 1, preprocess=preprocess)
    whole = found.on_scan()
    assert whole.volume.shape == (3, 8, 24, 20) and np.array_equal(whole.volume, frames.transpose(0, 1))
    assert found.relevance.shape == (8, 10, 10)
    pooled = whole.relevance[:, 2:22].reshape(8, 10, 2, 10, 2).sum((2, 4))
    np.testing.assert_allclose(pooled, found.relevance, rtol=5e-2, atol=2e-2 * np.abs(found.relevance).max())


def test_a_video_as_a_list_of_images():
    generator = np.random.default_rng(0)
    clips = [[Image.fromarray(generator.integers(0, 256, (20, 24, 3), np.uint8)) for _ in range(6)] for _ in range(2)]
    arrays = [torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in clip]) for clip in clips]
    model, of_tensor = classifier(3), video.R3D_18_Weights.DEFAULT.transforms(crop_size=(12, 12), resize_size=(16, 16))

    def of_list(frames):
        return torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1).float() / 255 for one in frames], 1)

    for preprocess, others in ((of_tensor, arrays), (of_list, [(one.float() / 255).transpose(0, 1) for one in arrays])):
        explainer = lrpfx.Explainer(model, preprocess=preprocess)
        found = explainer(clips, 1)
        assert isinstance(found, lrpfx.VolumeExplanations) and isinstance(explainer(clips[0]), lrpfx.VolumeExplanation)
        expected = lrpfx.Explainer(model, preprocess=None if preprocess is of_list else preprocess)(others, 1)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one.relevance, other.relevance)
    smooth = [one.resize((4, 5)).resize((24, 20), Image.Resampling.BICUBIC) for one in clips[0]]
    assert lrpfx.explain(model, smooth, preprocess=of_tensor).on_scan().volume.shape == (3, 6, 20, 24)
    with pytest.raises(InputTypeError, match="pass preprocess="):
        lrpfx.explain(model, clips[0])
    with pytest.raises(InputError, match="one size"):
        lrpfx.explain(model, [clips[0][0], clips[0][0].resize((3, 3))], preprocess=of_tensor)
    with pytest.raises(InputError, match=r"division by zero.*the list of frames"):
        lrpfx.explain(model, clips[0], preprocess=lambda frames: 1 / 0)


def test_a_processor_of_videos():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.VideoMAEConfig(image_size=16, patch_size=8, num_frames=4, num_labels=3, **sizes)
    processor = transformers.VideoMAEImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    frames = [Image.new("RGB", (20, 30), (number * 40, 20, 200)) for number in range(4)]
    torch.manual_seed(0)
    explainer = lrpfx.Explainer(transformers.VideoMAEForVideoClassification(config).eval(), preprocess=processor)
    direct = lrpfx.Explainer(explainer.model)(processor(frames, return_tensors="pt")["pixel_values"][0], 1)
    np.testing.assert_array_equal(explainer(frames, 1).relevance, direct.relevance)


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_folder_of_files(tmp_path, as_path):
    nibabel = pytest.importorskip("nibabel")
    generator = np.random.default_rng(0)
    for name in ("b.nii.gz", "a.nii", "inner/c.nii.gz", ".hidden.nii"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(generator.random((5, 6, 7), dtype=np.float32), np.eye(4)), tmp_path / name)
    (tmp_path / "README.txt").touch()
    found = lrpfx.explain(classifier(), as_path(tmp_path), 1)
    assert [one.name for one in found] == ["a.nii", "b.nii.gz", str(Path("inner/c.nii.gz"))]
    np.testing.assert_array_equal(found[1].relevance, lrpfx.explain(classifier(), tmp_path / "b.nii.gz", 1).relevance)
    paths = lrpfx.explain(classifier(), as_path(tmp_path), 1, preprocess=lambda path: nibabel.load(path))
    np.testing.assert_array_equal(paths[2].relevance, found[2].relevance)
    assert len({*found.save(tmp_path / "pictures")}) == 3


def test_layers_of_volumes():
    found = lrpfx.explain(UNet().eval(), torch.rand(1, 8, 8, 12), 1)
    assert found.layers().width > 100 and found.layers(["first", "inner"], columns=3).width > 100
    with pytest.raises(InputError, match=r"not \(channels, depth, height, width\)"):
        lrpfx.explain(classifier(), torch.rand(1, 6, 8, 10)).layers(["4"])


def test_a_program_and_several_inputs(tmp_path):
    model, volume = classifier(), torch.rand(1, 6, 8, 10)
    explain_model = lrpfx.transform(model, GammaByDepth())
    program = lrpfx.lower(explain_model, volume[None], target="index")
    lrpfx.save(program, tmp_path / "volume.pt2")
    found = lrpfx.explain(lrpfx.load(tmp_path / "volume.pt2"), volume, 1)
    assert_close(torch.from_numpy(found.input_relevance), lrpfx.attribute(explain_model, volume[None], 1).relevance[0], 1e-6)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.head = classifier(), nn.Linear(2, 3)

        def forward(self, scan, facts):
            return self.model(scan) + self.head(facts)

    joint = lrpfx.explain(Pair().eval(), {"scan": volume[None], "facts": torch.rand(1, 2)}, 1)
    assert isinstance(joint["scan"], lrpfx.VolumeExplanation) and joint.sheet().height > 100


@pytest.mark.parametrize(
    ("given", "settings", "kind", "message"),
    [
        (torch.zeros(1, 4, 4, 4, dtype=torch.uint8), {}, InputError, "255"),
        (torch.full((1, 4, 4, 4), torch.nan), {}, InputError, "finite"),
        (torch.zeros(4, 4), {}, InputError, "shape"),
        (torch.zeros(1, 0, 4, 4), {}, InputError, "shape"),
        ([], {}, InputError, "no volumes"),
        ("cat.jpg", {}, InputTypeError, "cat.jpg"),
        (torch.zeros(1, 4, 4, 4), {"form": "volumes"}, InputError, '"volume"'),
    ],
)
def test_errors(given, settings, kind, message):
    with pytest.raises(kind, match=message):
        lrpfx.explain(classifier(), given, **settings)


@pytest.mark.parametrize("ask", [lambda one: one.overlay(99), lambda one: one.overlay(axis=3), lambda one: one.planes((1, 2))])
def test_slices_that_there_are_not(ask):
    with pytest.raises(InputError) as caught:
        ask(lrpfx.explain(classifier(), torch.rand(1, 6, 8, 10)))
    assert caught.value.topic == "volumes"
