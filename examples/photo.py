"""Explain a photograph: python examples/photo.py [photo.jpg]. It writes explanation.png."""

import sys

import lrpfx
from lrpfx.demo import photographs

photo = sys.argv[1] if len(sys.argv) > 1 else photographs.path("chelsea")
network = photographs.load_classifier()  # EfficientNet-Lite0 with ImageNet's weights
explanation = lrpfx.explain(network.model, photo, preprocess=network.preprocess, categories=network.categories)
print("\n".join(f"{category.probability:6.1%}  {category.name}" for category in explanation.top(5)))
print("written to", explanation.save("explanation.png"))
