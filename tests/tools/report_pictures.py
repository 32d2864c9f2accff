"""The reports of docs/report.md, and the pictures of them: `make report-pictures`."""

import io
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from browsers import chromium
from PIL import Image

import lrpfx
from lrpfx.demo import photographs, sentence_similarity

IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
SENTENCE = "A guitarist plays on stage while it rains."


def of_photographs() -> dict[str, Any]:
    """EfficientNet-Lite0 on two photographs, for two classes, under two composites."""
    network = photographs.load_classifier()
    settings = {"preprocess": network.preprocess, "categories": network.categories}
    found = {}
    for name, composite in (("GammaByDepth", None), ("EpsilonPlusFlat", lrpfx.composites.EpsilonPlusFlat())):
        explainer = lrpfx.Explainer(network.model, composite=composite, **settings)
        files = [photographs.path("chelsea"), photographs.path("china")]
        found[name] = explainer(files, targets=["tiger cat", "palace"])
    return found


class Topics(torch.nn.Module):
    """How similar a sentence is to some topics, by MiniLM."""

    def __init__(self, minilm: sentence_similarity.MiniLM, topics: list[str]) -> None:
        super().__init__()
        self.encoder = minilm.model
        with torch.no_grad():
            self.register_buffer("topics", torch.cat([minilm.model.embed(input_ids=minilm.ids(text)) for text in topics]))

    def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
        return self.encoder.embed(input_ids=input_ids) @ self.topics.T


def of_a_sentence() -> Any:
    """MiniLM on a sentence, for two topics."""
    minilm = sentence_similarity.load()
    topics = ["music", "weather"]
    explainer = lrpfx.Explainer(Topics(minilm, topics).eval(), tokenizer=minilm.tokenizer, categories=topics)
    return explainer(SENTENCE, targets=topics)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chromium("1400,900", "--hide-scrollbars") as browser:

        def shot(name: str) -> None:
            time.sleep(0.3)
            picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
            picture.save(IMAGES / name, optimize=True)

        def click(selector: str, place: int = 0) -> None:
            browser.find_elements("css selector", selector)[place].click()

        browser.get(f"file://{lrpfx.report(of_photographs(), Path(folder) / 'photographs.html')}")
        shot("report-photograph.png")
        browser.find_element("css selector", "[role=combobox]").send_keys("_blocks.10._project_conv", "\ue007")
        click(".theme")
        shot("report-node.png")
        click("#tab-compilation")
        stages = [each.text for each in browser.find_elements("css selector", ".stages .name")]
        click(".stages button", stages.index("merge batch norm"))
        shot("report-compilation.png")
        browser.get(f"file://{lrpfx.report(of_a_sentence(), Path(folder) / 'sentence.html', title='MiniLM')}")
        shot("report-text.png")


if __name__ == "__main__":
    main()
