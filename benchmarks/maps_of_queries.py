"""How often the map of classes of a segmenter of queries differs from what its image processor makes of it.

`python benchmarks/maps_of_queries.py`: EoMT learns squares, discs and triangles in noise, in some minutes.
"""

import torch
from torch.nn import functional

from lrpfx.demo import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision if it is there
from lrpfx.detection import semantic_map

# isort: split
from transformers import EomtConfig, EomtForUniversalSegmentation

SIDE, COUNT, STEPS = 48, 200, 900


def scenes(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (count, 3, side, side) and the class of each pixel: ground, square, disc or triangle."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    labels = torch.zeros(count, SIDE, SIDE, dtype=torch.long)
    for one in labels:
        for kind in torch.randperm(3)[: 1 + int(torch.randint(3, ()))].tolist():
            size, y, x = (int(torch.randint(low, high, ())) for low, high in ((6, 11), (8, SIDE - 8), (8, SIDE - 8)))
            down, across = rows - y, columns - x
            square = (down.abs() <= size * 0.8) & (across.abs() <= size * 0.8)
            disc = down**2 + across**2 <= size**2
            triangle = (down.abs() <= size) & (across.abs() <= (down + size) / 2)
            one[(square, disc, triangle)[kind]] = 1 + kind
    colors = torch.rand(count, 4, 3)
    images = colors[torch.arange(count)[:, None, None], labels].movedim(3, 1)
    return images + 0.1 * torch.randn_like(images), labels


def trained() -> EomtForUniversalSegmentation:
    torch.manual_seed(0)
    config = EomtConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_blocks=2, num_upscale_blocks=1, image_size=SIDE,
        patch_size=4, num_queries=8, num_labels=4, num_register_tokens=0, train_num_points=512,
    )  # fmt: skip
    model = EomtForUniversalSegmentation(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(STEPS):
        images, labels = scenes(8)
        classes = [one.unique() for one in labels]
        masks = [(one == some[:, None, None]).float() for one, some in zip(labels, classes, strict=True)]
        model.attn_mask_probs.fill_(max(0.0, 1 - 2 * step / STEPS))  # as its authors do
        loss = model(pixel_values=images, mask_labels=masks, class_labels=classes).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.attn_mask_probs.fill_(0.0)
    return model.eval()


@torch.no_grad()
def main() -> None:
    """Print how often both differ."""
    with torch.enable_grad():
        model = trained()
    images, labels = scenes(COUNT)
    found = semantic_map(model)(images).argmax(1)
    result = model(pixel_values=images)
    classes, masks = result.class_queries_logits.softmax(-1)[..., :-1], result.masks_queries_logits.sigmoid()
    added = torch.einsum("bqc,bqhw->bchw", classes, masks).argmax(1)  # what the image processor adds up
    truth = labels[:, 1::2, 1::2] if found.shape[1] * 2 == SIDE else labels
    padded = functional.pad(added[:, None].float(), (1, 1, 1, 1), mode="replicate")
    is_border = (functional.max_pool2d(padded, 3, 1) != -functional.max_pool2d(-padded, 3, 1))[:, 0]
    differs = found != added
    right, right_added = ((one == truth).float().mean() for one in (found, added))
    print(f"right places: {right:.1%} of the map, {right_added:.1%} of the sum")
    print(f"{differs.float().mean():.2%} of places differ, {is_border[differs].float().mean():.0%} of them at borders")
    at_borders = differs[is_border].float().mean()
    print(f"{is_border.float().mean():.1%} of places are at borders, and {at_borders:.1%} of these differ")


if __name__ == "__main__":
    main()
