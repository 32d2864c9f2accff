"""What `make docs` adds to mkdocs.

Tutorials are run, links leave the documentation, no public name is forgotten, the search knows words of other libraries, and
there are pages for agents.
"""

import functools
import logging
import re
import shutil
import tempfile
import zlib
from pathlib import Path

import tomllib
import torchvision_cpu  # noqa: F401  before the public names reach torchvision
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools import notebooks, public_api
from tools.public_names import public_names

ROOT = Path(__file__).parent.parent.parent
#: in strict mode, a warning of this logger fails the build
log = logging.getLogger("mkdocs.hooks.lrpfx")

_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
_SKIPPED_OR_NAME = re.compile(
    r"<(?P<tag>pre|a|autoref|h[1-6])\b.*?</(?P=tag)>|<code>(?P<name>[A-Za-z_][\w.]*)(?:\([^<]*)?</code>", re.DOTALL
)
#: In the tables of guides for those who come from elsewhere, the first column has names of others.
_NAME_OF_LRPFX = re.compile(rf"<tr>\s*<td>.*?</td>|{_SKIPPED_OR_NAME.pattern}", re.DOTALL)
_scratch = tempfile.TemporaryDirectory()
#: page -> words by which it is looked for, of this field and of other libraries; the search prefers them to all other words
SYNONYMS = {
    "photographs.md": ["heatmap", "saliency", "attribution", "images"],
    "visualizing.md": ["heatmap", "overlay", "colormap", "matplotlib"],
    "glossary.md": ["saliency map", "attribution map", "definitions"],
    "gpus.md": ["CUDA", "device", "graphics card"],
    "installation.md": ["pip", "conda", "CUDA", "CPU"],
    "performance.md": ["speed", "memory", "slow", "bfloat16", "float16"],
    "language_models.md": ["LLM", "BERT", "GPT", "Llama", "tokens"],
    "concepts.md": ["CRP", "channels", "heads", "neurons"],
    "composites.md": ["rules", "hyperparameters", "ViT"],
    "ledger.md": ["ledger", "conservation", "completeness", "additivity", "convergence delta"],
    "intermediate_relevance.md": ["record", "hidden layers"],
    "adapters.md": ["metrics", "faithfulness", "sanity check"],
    "datasets.md": ["batch", "SpRAy", "clusters"],
    "from_pytorch_grad_cam.md": ["Grad-CAM", "GradCAM", "CAM"],
    "from_captum.md": ["captum"],
    "from_shap.md": ["SHAP", "Shapley"],
    "from_lxt.md": ["LXT", "AttnLRP"],
    "from_zennit_crp.md": ["CRP", "zennit-crp"],
    "coming_from_zennit.md": ["zennit", "hooks"],
    "patents.md": ["licence", "license", "commercial"],
}
#: Where a name is documented comes before where it is used.
_BOOSTS = {"reference/explaining.md": 2.0, "reference/compiling.md": 2.0, "reference/attributing.md": 2.0}
#: Long tables and texts, in which any word occurs.
_BOOSTS |= dict.fromkeys(["changelog.md", "testing.md", "reference/all.md", "transformers.md", "torchvision.md"], 0.1)
#: page -> what replaces the places of outputs in its HTML
_outputs: dict[str, list[str]] = {}
#: page -> its Markdown
_sources: dict[str, str] = {}


def address() -> str:
    """Where the repository is; pyproject.toml says so, and nothing else does."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"])


@event_priority(100)  # before mkdocstrings reads its settings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    # A `repo_url` would make each page ask the host of the repository for its number of stars.
    config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": address(), "name": "The source"}]
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(_installed_layout())]
    return config


def _installed_layout() -> Path:
    """A folder with the package as it is installed, with passes/ in it; the reference is read from there."""
    folder = Path(_scratch.name) / "reference"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "lrpfx", folder / "lrpfx")
    shutil.copytree(ROOT / "passes", folder / "lrpfx" / "passes", dirs_exist_ok=True)
    return folder


def on_files(files: Files, config: MkDocsConfig) -> Files:
    changelog = _LINK.sub(lambda link: link[0].removeprefix("docs/"), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    files.append(File.generated(config, "changelog.md", content=changelog))
    files.append(File.generated(config, "reference/all.md", content=public_api.page()))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        path = Path(str(file.abs_src_path))
        log.info("Running %s", file.src_uri)
        text, outputs = notebooks.as_page(notebooks.executed(path))
        page = file.src_uri.removesuffix(".ipynb") + ".md"
        _outputs[page] = outputs
        notebook = f"{address().removeprefix('https://')}/blob/HEAD/{path.relative_to(ROOT)}"
        colab = f"https://colab.research.google.com/{notebook.replace('github.com', 'github', 1)}"
        download = f'<a class="md-button" href="{path.name}" download>Download this notebook</a>'
        download += f' <a class="md-button" href="{colab}">Open it in Colab</a>'
        files.append(File.generated(config, page, content=f"{text}\n\n{download}\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to notebooks lead to their pages, and links to what is not part of the documentation to the repository."""

    def moved(link: re.Match[str]) -> str:
        target = (Path(config.docs_dir) / page.file.src_uri).parent.joinpath(link[0]).resolve()
        if target.is_relative_to(config.docs_dir):
            return re.sub(r"\.ipynb$", ".md", link[0])
        if not (target.is_relative_to(ROOT) and target.exists()):
            log.warning("%s links to %s, which does not exist", page.file.src_uri, link[0])
            return link[0]
        return f"{address()}/blob/HEAD/{target.relative_to(ROOT)}"

    page.meta.setdefault("tags", SYNONYMS.get(page.file.src_uri, []))
    if page.file.src_uri in _BOOSTS:
        page.meta["search"] = {"boost": _BOOSTS[page.file.src_uri]}
    _sources[page.file.src_uri] = _LINK.sub(moved, markdown)
    return _sources[page.file.src_uri]


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Names in the text lead to the reference, and outputs are in their places."""
    names = _NAME_OF_LRPFX if page.file.src_uri.startswith("from_") else _SKIPPED_OR_NAME
    html = names.sub(_linked, html)
    for number, output in enumerate(_outputs.get(page.file.src_uri, [])):
        html = html.replace(notebooks.place(number), output)
    return html


def _linked(found: re.Match[str]) -> str:
    """A name of the text as a link that mkdocs-autorefs makes; what is a link or a block of code stays as it is."""
    name = found["name"] and (found["name"] if found["name"].startswith("lrpfx.") else _classes().get(found["name"]))
    return f'<autoref identifier="{name}" optional>{found[0]}</autoref>' if name else found[0]


@functools.cache
def _classes() -> dict[str, str]:
    """Public classes by their names alone; the text speaks of functions by their whole names."""
    found: dict[str, str] = {}
    for name, value in public_names():
        if isinstance(value, type):
            found.setdefault(name.rpartition(".")[2], name)
    return found


def on_post_build(config: MkDocsConfig) -> None:
    _write_for_agents(config)
    warn_of_missing_names(Path(config.site_dir))


def warn_of_missing_names(site: Path) -> None:
    """Warn of public names that the reference of a site does not document."""
    listed = reference(site)
    for name, _ in public_names():
        if name not in listed:
            log.warning("%s is not in the reference: it needs a docstring, and a page in docs/reference", name)


def _write_for_agents(config: MkDocsConfig) -> None:
    """The pages as Markdown beside their HTML, and llms.txt, which leads to them."""
    site = Path(config.site_dir)
    for page, text in _sources.items():
        (site / page).write_text(text, encoding="utf-8")
    text = public_api.llms_text(config.site_name, str(config.site_description), config.nav or [], _sources)
    (site / "llms.txt").write_text(text, encoding="utf-8")


def reference(site: Path) -> set[str]:
    """The names that the reference of a site documents."""
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines() if line}


def on_shutdown() -> None:
    _scratch.cleanup()
