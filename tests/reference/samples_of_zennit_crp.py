"""Reference samples by zennit-crp 0.6: those with the largest activation, or relevance, of each channel."""

import contextlib
import functools
import io
from typing import NamedTuple

import numpy as np
import torch
import zennit.composites
from crp.attribution import CondAttribution
from crp.concepts import ChannelConcept
from crp.visualization import FeatureVisualization

from lrpfx.demo import digits
from reference.for_zennit import for_zennit

#: zennit-crp keeps so many samples of each channel.
KEPT = 40


class Samples(NamedTuple):
    """What was found for each channel of a layer, the largest score first. All have the shape (samples kept, channels)."""

    samples: np.ndarray  # places in the data set, int64
    scores: np.ndarray
    positions: np.ndarray  # y * width + x of the largest value, int64


@functools.cache
def digits_network(count=500):
    """A trained network with skip connections, and so many digits, in double precision."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        train, _ = digits.load()
        with contextlib.redirect_stderr(io.StringIO()):
            model = digits.train(train, epochs=2)
    finally:
        torch.set_default_dtype(dtype)
    return model.double(), digits.Digits(train.images[:count].double(), train.labels[:count])


def reference_samples(model, images, labels, layers, directory, *, composite="epsilon_plus_flat", max_target="sum"):
    """`Samples` of `FeatureVisualization.run` by ("activation" or "relevance", layer), with all other settings as they are.

    `model`: one that `for_zennit` and zennit's composites treat right without a canonizer. `layers`: paths of its modules,
    with values of shape (batch, channels, height, width) or (batch, features). `directory`: an empty one, where zennit-crp
    writes. `max_target`: "sum" or "max". Below, the values of a layer are its activation or its relevance.

    - Score of a channel: the sum over positions of its values, or the largest of them. Both are signed: large negative values
      score lowest.
    - Normalization: scores are divided by the sum of the magnitudes of the scores of all channels of the layer, for the same
      sample, plus 1e-10. That is not the sum of the magnitudes of all values. It applies to activations as well, and to "max".
    - Relevance is that of the *true* class, the label in the data set: the seed is its output, also if the model predicts
      another class. No condition holds, and skip connections take part.
    - A layer's values are what its module returns: those of a convolution are after a merged batch norm, before the ReLU.
    - Position: that of the largest signed value of the channel, for "sum" as well; 0 in dense layers.
    - The first of the samples has the largest score. Samples with scores that are 0 or negative count as any others.
    - Ties have no order: each batch is sorted by torch.argsort, which is not stable, and what is kept of all batches by the
      reverse of an ascending torch.argsort. The position is torch.argmax, which may be any of several equal ones.
    """
    oracle = for_zennit(model)
    data = [(image, int(label)) for image, label in zip(images, labels, strict=True)]
    channels = {layer: ChannelConcept() for layer in layers}
    visualization = FeatureVisualization(
        CondAttribution(oracle), data, channels, max_target=max_target, abs_norm=True, path=str(directory)
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        visualization.run(zennit.composites.COMPOSITES[composite](), 0, len(data), batch_size=100)
    found = {}
    for kind, folder in (("activation", "ActMax"), ("relevance", "RelMax")):
        for layer in layers:
            parts = [np.load(f"{directory}/{folder}_{max_target}_normed/{layer}_{part}.npy") for part in ("data", "rel", "rf")]
            found[kind, layer] = Samples(*parts)
    return found
