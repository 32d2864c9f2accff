"""Small detectors of all families with random weights, and what is done after their heads, box by box."""

import copy
from functools import partial

import pytest
import torch
import torchvision_cpu  # noqa: F401
from torch import nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.ops import MultiScaleRoIAlign, poolers
from torchvision.ops import boxes as box_operations

transformers = pytest.importorskip("transformers")


class Backbone(nn.Module):
    """Two maps, with an eighth and a sixteenth of the image's size."""

    def __init__(self, channels=8):
        super().__init__()
        self.out_channels = channels
        self.first = nn.Sequential(
            nn.Conv2d(3, channels, 3, 4, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU())

    def forward(self, x):
        first = self.first(x)
        return {"0": first, "1": self.second(first)}


SIZES = {"min_size": 64, "max_size": 128, "size_divisible": 16}


def retinanet(**settings):
    anchors = AnchorGenerator(((16,), (32,)), ((0.5, 1.0, 2.0),) * 2)
    return detection.RetinaNet(Backbone(), 4, anchor_generator=anchors, **SIZES, **settings)


def fcos(**settings):
    anchors = AnchorGenerator(((8,), (16,)), ((1.0,),) * 2)
    return detection.FCOS(Backbone(32), 4, anchor_generator=anchors, **SIZES, **settings)


def ssd(**settings):
    anchors = DefaultBoxGenerator([[2], [2, 3]])
    head = detection.ssd.SSDHead([8, 8], anchors.num_anchors_per_location(), 4)
    return detection.ssd.SSD(Backbone(), anchors, (64, 80), 4, head=head, **settings)


def faster_rcnn(kind=detection.FasterRCNN, **settings):
    anchors = AnchorGenerator(((16,), (32,)), ((0.5, 1.0, 2.0),) * 2)
    pool = MultiScaleRoIAlign(["0", "1"], 3, 2, canonical_scale=24)
    counts = {"rpn_post_nms_top_n_test": 60, "box_detections_per_img": 20, "box_score_thresh": 0.2}
    head = detection.faster_rcnn.TwoMLPHead(8 * 9, 16)
    predictor = detection.faster_rcnn.FastRCNNPredictor(16, 4)
    settings = {"box_roi_pool": pool, "box_head": head, "box_predictor": predictor, **counts, **SIZES, **settings}
    return kind(Backbone(), rpn_anchor_generator=anchors, **settings)


def ssdlite(**settings):
    anchors = DefaultBoxGenerator([[2], [2, 3]])
    norm = partial(nn.BatchNorm2d, eps=0.001)
    head = detection.ssdlite.SSDLiteHead([8, 8], anchors.num_anchors_per_location(), 4, norm)
    return detection.ssd.SSD(Backbone(), anchors, (64, 80), 4, head=head, score_thresh=0.1, nms_thresh=0.55, **settings)


def mask_rcnn(**settings):
    kind, parts = detection.MaskRCNN, detection.mask_rcnn
    masks = {"mask_head": parts.MaskRCNNHeads(8, (8,), 1), "mask_predictor": parts.MaskRCNNPredictor(8, 8, 4)}
    return faster_rcnn(kind, mask_roi_pool=MultiScaleRoIAlign(["0", "1"], 4, 2), **masks, **settings)


def keypoint_rcnn(**settings):
    kind, parts = detection.KeypointRCNN, detection.keypoint_rcnn
    points = {"keypoint_head": parts.KeypointRCNNHeads(8, (8,)), "keypoint_predictor": parts.KeypointRCNNPredictor(8, 3)}
    return faster_rcnn(kind, keypoint_roi_pool=MultiScaleRoIAlign(["0", "1"], 4, 2), **points, **settings)


#: Heads of boxes on proposals, alone or beside heads of masks or keypoints.
OF_REGIONS = {"FasterRCNN": faster_rcnn, "MaskRCNN": mask_rcnn, "KeypointRCNN": keypoint_rcnn}
TORCHVISION = {"RetinaNet": retinanet, "FCOS": fcos, "SSD": ssd, "SSDlite": ssdlite, **OF_REGIONS}


def made(name, seed=0):
    """A detector in evaluation mode whose confidences are spread out."""
    torch.manual_seed(seed)
    detector = TORCHVISION[name]().eval()
    for module in detector.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
    return detector


def of_transformers(name):
    """A detector of queries in float64, by its family."""
    torch.manual_seed(0)
    small = {"d_model": 16, "num_queries": 12, "num_labels": 4, "encoder_layers": 1, "decoder_layers": 2}
    attention = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    stages = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "embedding_size": 8, "layer_type": "basic"}
    if name == "Yolos":
        vit = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 8}
        config = transformers.YolosConfig(**vit, image_size=[64, 64], num_detection_tokens=12, num_labels=4)
    elif name == "RTDetr":
        backbone = transformers.RTDetrResNetConfig(**stages, out_features=["stage2", "stage3", "stage4"])
        inputs = {"encoder_in_channels": [16, 24, 32], "decoder_in_channels": [16] * 3, "encoder_hidden_dim": 16}
        config = transformers.RTDetrConfig(
            **{"backbone_config": backbone, "decoder_n_points": 2, "num_denoising": 0}, **inputs, **small, **attention
        )
    else:
        backbone = transformers.ResNetConfig(**stages, out_features=["stage4"])
        kind = getattr(transformers, f"{name}Config")
        config = kind(backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, **small, **attention)
    model = getattr(transformers, f"{name}ForObjectDetection")(config).double().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if any(part in path for part in ("class", "bbox", "query", "token", "position")) or parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim > 1 else 0.2))
    return model


class Distribution(nn.Module):
    """The mean of a distribution over bins, as Ultralytics' DFL computes it."""

    def __init__(self, bins):
        super().__init__()
        self.conv = nn.Conv2d(bins, 1, 1, bias=False)
        self.conv.weight.data[:] = torch.arange(bins, dtype=torch.float).view(1, bins, 1, 1)
        self.bins = bins

    def forward(self, x):
        batch, _, places = x.shape
        return self.conv(x.view(batch, 4, self.bins, places).transpose(2, 1).softmax(1)).view(batch, 4, places)


class Detect(nn.Module):
    """A head with the attributes of Ultralytics' Detect, and what it returns: boxes (centres, sizes) and probabilities."""

    def __init__(self, classes, channels, strides, end2end):
        super().__init__()
        self.nc, self.nl, self.reg_max, self.end2end = classes, len(channels), 4, end2end
        self.stride = torch.tensor(strides)
        self.cv2 = nn.ModuleList(nn.Conv2d(one, 4 * self.reg_max, 1) for one in channels)
        self.cv3 = nn.ModuleList(nn.Conv2d(one, classes, 1) for one in channels)
        if end2end:
            self.one2one_cv2, self.one2one_cv3 = copy.deepcopy(self.cv2), copy.deepcopy(self.cv3)
        self.dfl = Distribution(self.reg_max)

    def forward(self, maps):
        boxes, scores = [], []
        prefix = "one2one_" if self.end2end else ""
        for level, one in enumerate(maps):
            codes = getattr(self, prefix + "cv2")[level](one).flatten(2)
            left, above, right, below = (self.dfl(codes) * self.stride[level]).unbind(1)
            rows, columns = one.shape[2:]
            y, x = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
            x, y = x.flatten() * self.stride[level], y.flatten() * self.stride[level]
            corners = x - left, y - above, x + right, y + below
            boxes.append(torch.stack([(corners[0] + corners[2]) / 2, (corners[1] + corners[3]) / 2], 1))
            boxes[-1] = torch.cat([boxes[-1], torch.stack([corners[2] - corners[0], corners[3] - corners[1]], 1)], 1)
            scores.append(getattr(self, prefix + "cv3")[level](one).flatten(2).sigmoid())
        return torch.cat([torch.cat(boxes, 2), torch.cat(scores, 2)], 1), maps


class Joined(nn.Module):
    def forward(self, maps):
        return torch.cat(maps, 1)


class Halves(nn.Module):
    """A block that goes on with a list of halves, as Ultralytics' C2f."""

    def __init__(self, channels):
        super().__init__()
        self.first, self.last = nn.Conv2d(channels, channels, 1), nn.Conv2d(3 * channels // 2, channels, 1)
        self.m = nn.ModuleList([nn.Sequential(nn.Conv2d(channels // 2, channels // 2, 3, 1, 1), nn.SiLU())])

    def forward(self, x):
        found = list(self.first(x).chunk(2, 1))
        found.extend(one(found[-1]) for one in self.m)
        return x + self.last(torch.cat(found, 1))


class Yolo(nn.Module):
    """Modules with the places of what they read, as Ultralytics' DetectionModel has them."""

    def __init__(self, end2end=False):
        super().__init__()
        layers = [
            (-1, nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.SiLU())),
            (-1, nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.SiLU(), Halves(8))),
            (-1, nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU())),
            (-1, nn.Upsample(scale_factor=2)),
            ([-1, 1], Joined()),
            ([4, 2], Detect(3, [24, 16], [8.0, 16.0], end2end)),
        ]
        for number, (source, layer) in enumerate(layers):
            layer.f, layer.i = source, number
        self.model, self.save = nn.Sequential(*(layer for _, layer in layers)), [1, 2, 4]
        self.names = {0: "cat", 1: "dog", 2: "hen"}

    def forward(self, x):
        kept = []
        for module in self.model:
            if module.f != -1:
                x = [x if one == -1 else kept[one] for one in module.f]
            x = module(x)
            kept.append(x if module.i in self.save else None)
        return x


def yolo(end2end=False):
    torch.manual_seed(0)
    detector = Yolo(end2end).eval()
    with torch.no_grad():
        for path, parameter in detector.named_parameters():
            if "cv" in path:
                parameter.copy_(torch.randn_like(parameter) * 2)
    return detector


TRANSFORMERS = ("Detr", "ConditionalDetr", "RTDetr", "Yolos")


def suppressed(boxes, scores, overlap):
    """What torchvision.ops.nms returns: it is not there beside a CPU build of torch."""
    order, kept = scores.argsort(descending=True, stable=True).tolist(), []
    overlaps = box_operations.box_iou(boxes, boxes)
    while order:
        kept.append(order.pop(0))
        order = [other for other in order if not overlaps[kept[-1], other] > overlap]
    return torch.tensor(kept, dtype=torch.long)


def pooled(input, rois, output_size, spatial_scale=1.0, sampling_ratio=-1, aligned=False):
    """What the kernels of torchvision.ops.roi_align return, sample by sample; their stand-in in Python reads beyond the map."""
    high, wide = output_size
    height, width = input.shape[2:]
    result = input.new_zeros(len(rois), input.shape[1], high, wide)
    for number, (sample, *corners) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (edge * spatial_scale for edge in corners)
        part_x, part_y = max(x2 - x1, 1.0) / wide / sampling_ratio, max(y2 - y1, 1.0) / high / sampling_ratio
        for row in range(high * sampling_ratio):
            for column in range(wide * sampling_ratio):
                x, y = x1 + (column + 0.5) * part_x, y1 + (row + 0.5) * part_y
                if not (-1 <= x <= width and -1 <= y <= height):
                    continue
                x, y = min(max(x, 0.0), width - 1.0), min(max(y, 0.0), height - 1.0)
                left, top = int(x), int(y)
                right, low = min(left + 1, width - 1), min(top + 1, height - 1)
                map_ = input[int(sample)]
                upper = map_[:, top, left] * (1 - x + left) + map_[:, top, right] * (x - left)
                lower = map_[:, low, left] * (1 - x + left) + map_[:, low, right] * (x - left)
                value = upper * (1 - y + top) + lower * (y - top)
                result[number, :, row // sampling_ratio, column // sampling_ratio] += value / sampling_ratio**2
    return result


def replace_kernels(monkeypatch):
    """Let torchvision's detectors run beside a CPU build of torch, as with its own kernels."""
    monkeypatch.setattr(box_operations, "nms", suppressed)
    monkeypatch.setattr(poolers, "roi_align", pooled)
