"""Where docs/troubleshooting.md explains an error: the sections, and which messages belong to each.

A section has the messages of some modules, or those of them that have a phrase, a regular expression after a colon. A phrase
decides before a module, and a module before the package around it. The page is made from the same table.
"""

import re
from collections.abc import Iterator
from functools import cache
from types import TracebackType

from lrpfx.version import DOCUMENTATION

SECTIONS = {
    # installing
    "missing-package": (
        "support.optional_packages",
        "command_line: packages that are not installed",
        "deploy.backends.onnx: packages that are not installed",
        "reports.drawing: needs Graphviz",
        "command_line.models: is needed for this model and cannot be imported",
    ),
    "release-of-torch": ("support.torch_internals",),
    "out-of-memory": (": there is not enough memory",),
    # transforming
    "arguments-of-transform": ("pipeline", "frontends.capture: ^capture is|dynamic_shapes is for"),
    "explainable-module": (
        "runtime.explain_module: takes the module that",
        "pipeline: explainable module already|node_names takes",
        "reports.check",
    ),
    "no-values": (": on the meta device",),
    "training-mode": (": training mode|Call model.eval|statistics of the batch", "passes.normalize.remove_dropout"),
    "random-numbers": (": draws random numbers",),
    "untraceable-forward": (
        "frontends",
        "frontends.capture: no graph of|no front end|the composite maps .* as a whole|does not name the argument|has no input for",
        "passes.normalize.normalize_operators",
        "ir.guards: torch.export found",
    ),
    "overwritten-tensors": (
        "passes.normalize.remove_inplace",
        "passes.normalize.normalize_operators: writes into another tensor",
        "frontends.symbolic: writes into a tensor",
        "passes.program: forward overwrites",
    ),
    "caches": ("frontends.exported: a graph cannot hold|which a graph",),
    "scripted-and-quantized": ("frontends.dequantize", "frontends.capture: torch.jit"),
    "packed-sequences": (": packed sequences|is packed",),
    "names-of-modules": ("ir.written_names", "runtime.explain_module: already|has a child|taken"),
    "example-inputs": (
        "frontends.capture",
        "operators.functions: [Pp]ass example_inputs",
        "frontends.symbolic: has no argument that could be an input",
    ),
    "dynamic-shapes": ("frontends.open_sizes",),
    "graph-differs": ("passes.driver: after .* the graph of",),
    # rules and composites
    "operation-without-a-rule": ("passes.validate: have no rule|has no rule|in a name map",),
    "rule-does-not-fit": ("passes.validate", "rules", "module_mode", "layers", "runtime.ruled_operation", "runtime.propagation"),
    "settings-of-rules": (
        "rules.numbers",
        "rules.stabilizer",
        "rules.formulas: must be|low must|has values that are not finite",
        "rules.modifiers",
    ),
    "own-rules": (
        "rules.template",
        "rules.hook",
        "rules.ratios",
        "rules.modifiers: does not define",
        "runtime.propagation: returned",
        "reports.ledger: accounts for",
        "operators.table",
    ),
    "entries-of-composites": ("composites", "passes.assign: which is not a rule"),
    "named-composites": ("composites: there is no composite|the composite ", "command_line.options: the settings do not fit"),
    "entries-that-match-nothing": ("passes.assign: match no layer",),
    "range-of-the-input": (
        "passes.analyze.infer_signs",
        "attribution.arguments: input_range",
        "composites: low and high bound",
    ),
    # canonizing
    "batch-norm-not-merged": (
        "passes.canonize",
        "operators.pooling",
        "operators.selection",
        "operators.channels",
        "operators.views",
        "operators.row",
    ),
    "canonizers-of-modules": ("canonizers", "pipeline: changes modules"),
    "attention-not-fused": ("passes.rewrite.fuse_attention", "passes.normalize.fold_masks"),
    "softmax-at-the-end": (
        "passes.canonize.explain_logits",
        ": explain the logits",
    ),
    # attributing
    "kinds-of-inputs": (
        "attribution.arguments",
        "runtime.explain_module: arguments were given|there is no input|is missing",
        "attribution.computation: one target for each",
    ),
    "inputs-do-not-fit": (
        "attribution.arguments: cannot run on these inputs|^the inputs (are|have the shape)",
        "attribution.out_of_vocabulary",
        "operators.functions",
        "operators.recurrent",
        "runtime.explain_module",
        "ir.guards",
        "runtime.propagation: took for a signal",
    ),
    "values-not-finite": (": not finite|values that are NaN",),
    "targets": ("attribution.targets",),
    "choice-of-output": ("attribution.targets: the model's output|the output has dtype|explains one tensor",),
    "targets-and-chunks": ("attribution.computation",),
    "names-of-nodes": ("attribution.names",),
    "implausible-relevance": ("attribution.compute", "attribution.plausibility", "reports.ledger: not determined"),
    "ledger": ("reports.ledger",),
    "no-path-to-the-input": (
        "attribution.computation: does not depend",
        "attribution.recorders",
        "runtime.layer_call",
    ),
    "changed-module": (
        "runtime.explain_module: loaded value|has dtype .* captured",
        "explanation.running: the model has changed",
    ),
    "derivative-of-relevance": ("runtime: relevance is not differentiable",),
    "attributors": ("attribution.attributors",),
    "mixtures-of-experts": ("attribution.experts", "attribution.mixtures", "attribution.conditions: expert"),
    # conditions and concepts
    "conditions": ("attribution.conditions", "attribution.channels", "attribution.condition_module", "runtime.masked_relevance"),
    "start-of-relevance": (": relevance (that enters )?(starts )?where|relevance where it starts|start is the name", "attribution.computation: start="),
    "collections": ("concepts.collecting", "concepts.collection"),
    "references": ("concepts.references", "concepts.receptive_fields", "concepts.windows"),
    "attribution-graphs": ("concepts.attribution_graphs", "concepts.shares", "concepts.patching"),
    # photographs and texts
    "explainer": ("explanation",),
    "image-files": ("explanation.photographs", "command_line.image_files"),
    "preprocessing": ("explanation.preprocessing", "deploy.preprocessing: resized to"),
    "names-of-classes": (": categor|names of classes",),
    "sentences": ("explanation.sentences",),
    "text-heatmaps": ("text",),
    "heatmaps": ("pictures", "image"),
    "colour-maps": ("cmap", "pictures.colors", ": is not a colour map"),
    # data sets
    "arguments-of-data-sets": ("datasets.running", "datasets.settings", "datasets.explaining", "datasets.engines"),
    "sources-of-samples": ("datasets.sources", "datasets.samples", "datasets.preparing"),
    "data-has-changed": (
        "datasets: has changed|has the dataset changed|is not what it was|begun with other",
    ),
    "stores": ("datasets.store", "datasets.layout", "datasets.places", "datasets.view", "datasets.tables", "datasets.asked"),
    "ray": ("datasets.ray_cluster", "datasets.ray_engine"),
    "statistics": ("datasets.statistics", "datasets.rows", "datasets.reduced_maps"),
    "spray": ("datasets.spray_analysis", "datasets.clusters"),
    "virelay": (
        "datasets.virelay",
        "datasets.virelay_arrays",
        "datasets.virelay_files",
        "datasets.virelay_images",
    ),
    # deploying
    "lowering": ("deploy.lowering", "passes.lower", "deploy.backends"),
    "saving-programs": ("deploy.files", "deploy.program", "deploy.backends.compiled"),
    "preprocessing-in-programs": ("deploy.preprocessing",),
    "refused-files": (
        "deploy.archive",
        "deploy.artefact",
        "deploy.manifest",
        "deploy.self_test",
        "deploy.backends.exported",
    ),
    "running-programs": ("deploy.runner",),
    # reports and the command line
    "reports": ("reports", "pages"),
    "options-of-commands": ("command_line",),
    "models-by-name": ("command_line.models",),
    "results-of-commands": ("command_line.results",),
    # others
    "defect": ("passes", "ir", "runtime", "operators", "command_line.application: should not happen"),
}


def address(section: str | None = None) -> str:
    """The address of a section of the page, or of the page."""
    return f"{DOCUMENTATION}/troubleshooting/" + ("" if section is None else f"#{section}")


def sections_of(message: str, module: str) -> list[str]:
    """The sections that claim a message of a module, the most specific claims alone: one, or the table is wrong."""
    claims = [
        (bool(phrase), len(place), section)
        for section, place, phrase in _claims()
        if f"{module}.".startswith(place) and (not phrase or re.search(phrase, message))
    ]
    best = max((claim[:2] for claim in claims), default=None)
    return list(dict.fromkeys(section for *strength, section in claims if tuple(strength) == best))


def section_of(error: BaseException) -> str | None:
    """The section about an error, by the module of lrpfx that raised it, or None if that is not known."""
    modules = [str(frame.f_globals.get("__name__")) for frame in _frames(error.__traceback__)]
    raised_in = next((name for name in reversed(modules) if name == "lrpfx" or name.startswith("lrpfx.")), "")
    return next(iter(sections_of(str(error), raised_in)), None)


def _frames(trace: TracebackType | None) -> Iterator[object]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


@cache
def _claims() -> list[tuple[str, str, str]]:
    """The section, the start of the module's name, and the phrase of each claim."""
    found = []
    for section, claims in SECTIONS.items():
        for claim in claims:
            place, _, phrase = claim.partition(": ") if ": " in claim else (claim, "", "")
            found.append((section, f"lrpfx.{place}." if place else "", phrase))
    return found
