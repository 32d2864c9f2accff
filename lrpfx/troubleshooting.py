"""Where docs/troubleshooting.md explains an error: the sections, and which messages belong to each.

A section has the messages of some modules, or those of them that have a phrase, a regular expression after a colon. A phrase
decides before a module, and a module before the package around it. The page is made from the same table.
"""

import re
from collections.abc import Iterator
from functools import cache
from types import FrameType, TracebackType

from lrpfx.version import DOCUMENTATION

SECTIONS = {
    # installing
    "missing-package": (
        "support.optional_packages",
        ": packages that are not installed|is needed for this model and cannot be imported|needs Graphviz|needs a C.. compiler",
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
    "training-mode": (": training mode|between its layers is on|attention with dropout|statistics of the batch",),
    "random-numbers": (": draws random numbers",),
    "untraceable-forward": (
        "frontends",
        "frontends.capture: no graph of|no front end|the composite maps .* as a whole|does not name the argument",
        "ir.guards: torch.export found",
    ),
    "arguments-of-operations": ("passes.normalize.normalize_operators",),
    "overwritten-tensors": (
        "passes.normalize.remove_inplace",
        "passes.normalize.normalize_operators: writes its result into another tensor",
        "frontends.symbolic: writes into a tensor",
        "passes.program: forward overwrites",
    ),
    "caches": ("frontends.exported: which a graph cannot hold",),
    "scripted-and-quantized": ("frontends.dequantize", "frontends.capture: torch.jit"),
    "packed-sequences": (": packed sequences",),
    "names-of-modules": ("ir.written_names", "runtime.explain_module: has a child"),
    "example-inputs": (
        "frontends.capture",
        "operators.functions: [Pp]ass example_inputs",
        "frontends.symbolic: has no argument that could be an input",
    ),
    "dynamic-shapes": ("frontends.open_sizes",),
    "graph-differs": ("passes.driver: but the model does not|does not compute the same as|it returns",),
    # rules and composites
    "operation-without-a-rule": (
        "passes.validate: have no rule|has no rule|needs no rule|in a name map",
        "passes.normalize.split_complex_numbers",
    ),
    "rule-does-not-fit": ("passes.validate", "rules", "module_mode", "layers", "runtime.propagation"),
    "rules-already": (": has (a rule|rules) already|is registered on a model already",),
    "settings-of-rules": ("rules.numbers", "rules.stabilizer", "rules.formulas: must be|low must", "rules.modifiers"),
    "own-rules": (
        "rules.template",
        "rules.hook",
        "rules.ratios",
        "rules.modifiers: does not define",
        "runtime.ruled_operation: returned .* relevance",
        "support.tensors",
        "runtime.code_of_rules",
        "runtime.overwriting",
        "reports.ledger: accounts for .*, but",
        "operators.table",
    ),
    "entries-of-composites": ("composites", "passes.assign"),
    "named-composites": ("composites: there is no composite|the composite ", "command_line.options: the settings do not fit"),
    "entries-that-match-nothing": ("passes.assign: match no layer",),
    "range-of-the-input": (
        "passes.analyze.infer_signs",
        "attribution.arguments: input_range",
        "composites: low and high bound",
    ),
    # canonizing
    "left-alone-by-canonizers": (
        "passes.canonize",
        "operators.pooling",
        "operators.selection",
        "operators.channels",
        "operators.views",
    ),
    "canonizers-of-modules": ("canonizers", "pipeline: changes modules"),
    "left-alone-by-optimizations": (
        "passes.rewrite",
        "passes.normalize",
        "passes.lower.out_of_place",
    ),
    "parts-of-layers": (
        ": carry relevance as functions of their own",
        "operators.contractions",
        "passes.normalize.find_linear",
        "passes.normalize.find_softmax",
    ),
    "softmax-at-the-end": ("passes.canonize.explain_logits", ": explain the logits"),
    # attributing
    "kinds-of-inputs": ("attribution.arguments",),
    "inputs-do-not-fit": (
        ": there is no input .*; the inputs are",
        "attribution.arguments: cannot run on these inputs|^the inputs (are|have the shape)",
        "attribution.out_of_vocabulary",
        "attribution.arguments: the embedding .* has .* entries",
        "operators.functions",
        "operators.recurrent",
        "runtime.explain_module",
    ),
    "graph-made-for-other-inputs": (
        ": but the graph|the compiler (assumed|took)|the graph needs",
        "ir.guards",
        "runtime.explain_module: was captured by torch.export for",
    ),
    "values-not-finite": (": not finite|values that are NaN", "attribution.conditions: where it starts has values"),
    "targets": (
        "attribution.targets",
        "attribution.computation",
        ": one target for each sample|the list of targets is empty|(target|position) .* is out of range: the output",
    ),
    "choice-of-output": (
        "attribution.outputs",
        "attribution.targets: the model's output|the output has dtype|explains one tensor",
        "attribution.plausibility: given as output=",
    ),
    "names-of-nodes": ("attribution.names", "support.dotted_paths"),
    "implausible-relevance": (
        "attribution.compute",
        "attribution.plausibility",
        "attribution.cut_inputs",
        ": the map (is (not determined|empty)|does not add up)",
    ),
    "no-path-to-the-input": ("attribution.computation: does not depend", "attribution.recorders", "runtime.layer_call"),
    "changed-weights": ("runtime.explain_module: loaded value", "explanation.running: the model has changed"),
    "derivative-of-relevance": ("runtime: relevance is not differentiable", "runtime.live_derivatives"),
    "attributors": ("attribution.attributors",),
    "captum-and-quantus": ("adapters",),
    "mixtures-of-experts": ("attribution.experts", "attribution.mixtures", "attribution.conditions: expert"),
    # conditions and concepts
    "conditions": (
        "attribution.conditions",
        "attribution.channels",
        "attribution.condition_module",
        "runtime.masked_relevance",
    ),
    "start-of-relevance": (
        ": relevance (that enters )?(starts )?where|relevance where it starts has shape|start is the name|start= explains",
    ),
    "collections": ("concepts.collecting", "concepts.collection", ": ^channel .* is out of range"),
    "references": ("concepts.references", "concepts.receptive_fields", "concepts.windows"),
    "attribution-graphs": ("concepts.attribution_graphs", "concepts.shares", "concepts.patching"),
    # photographs, texts, pictures
    "explainers": ("explanation",),
    "programs-in-explainers": (
        "explanation: ^the program|exported program|programs of text models|was pickled without its model",
    ),
    "classes-and-their-names": (
        ": categor|names of classes|names no class",
        "explanation.explanation: class",
        "explanation.running: class",
    ),
    "image-files": (
        "explanation.photographs",
        "command_line.image_files",
        ": there is no image in|the batch of images is empty",
        ": it cannot be decoded|it is not an image|it has more than .* pixels",
    ),
    "preprocessing": ("explanation.preprocessing", "deploy.preprocessing: ^resized to"),
    "sentences": ("explanation.sentences", "explanation.texts"),
    "text-heatmaps": ("text",),
    "heatmaps": ("pictures", "image", ": value_range is .lowest"),
    "photographs-behind-heatmaps": ("pictures.photographs", "pictures.heatmaps: ^the photograph"),
    "colour-maps": ("cmap", "pictures.colors", ": is not a colour map"),
    # data sets
    "arguments-of-data-sets": ("datasets",),
    "samples": (
        "datasets.sources",
        "datasets.loaders",
        "datasets.samples",
        "datasets.preparing",
        ": ^there are no samples|^samples are the numbers of samples|some samples have labels|the data set is empty",
    ),
    "changed-data": (
        ": (sample|data set|dataset) .*changed|is not what it was when|was begun with other",
        "datasets.running: its weights or its rules|it was .* and is .* now",
    ),
    "reading-stores": (
        "datasets.view",
        "datasets.asked",
        "datasets.store: has the shape",
        ": sample .* is out of range: there are|a sample is out of range",
    ),
    "places-of-stores": ("datasets.places",),
    "damaged-stores": ("datasets.store", "datasets.layout", "datasets.tables", "datasets.view: damaged|has no scales"),
    "ray": ("datasets.ray_cluster", "datasets.ray_engine"),
    "statistics": ("datasets.statistics", "datasets.rows", "datasets.reduced_maps", ": no sample has the class"),
    "spray": ("datasets.spray_analysis", "datasets.clusters"),
    "virelay": ("datasets.virelay", "datasets.virelay_files"),
    "images-for-virelay": ("datasets.virelay_arrays", "datasets.virelay_images"),
    # deploying
    "lowering": ("deploy.lowering",),
    "examples-for-lowering": ("deploy.lowering: example|^the inputs have|the model takes",),
    "formats-of-programs": ("deploy.backends", "passes.lower"),
    "preprocessing-in-programs": ("deploy.preprocessing",),
    "files-and-folders": (
        "deploy.files",
        "errors",
        "datasets.places: cannot be",
        ": there is no folder|cannot be written:|another run writes to",
    ),
    "refused-files": (
        "deploy.archive",
        "deploy.artefact",
        "deploy.manifest",
        "deploy.self_test",
        "deploy.signatures",
        "deploy.torch_operators",
        "deploy.onnx_operators",
        "deploy.backends.exported",
        "deploy.backends.onnx: ^it |^its |onnxruntime .* cannot load|the file of its parameters",
        "concepts.collection: ^its? |^rankings|is not a collection|are invalid|have another form",
        ": it holds .*, which does not belong in it|^it is damaged",
    ),
    "running-programs": ("deploy.runner", "deploy.program"),
    "serving-programs": ("serve", "command_line.serve"),
    # reports and the command line
    "reports": ("reports", "pages", ": a report is written as"),
    "options-of-commands": ("command_line",),
    "models-by-name": ("command_line.models",),
    "results-of-commands": ("command_line.results", ": these (photographs|images) ", "command_line.dataset: ^and .* others"),
    # others
    "defects": ("passes", "ir", "runtime", "command_line.application"),
}


def address(section: str | None = None) -> str:
    """The address of a section of the page, or of the page."""
    return f"{DOCUMENTATION}/troubleshooting/" + ("" if section is None else f"#{section}")


def sections_of(message: str, module: str) -> list[str]:
    """The sections that claim a message of a module, the most specific claims alone: one, or the table is wrong."""
    claims = [
        (phrase is not None, len(place), section)
        for section, place, phrase in _claims()
        if f"{module}.".startswith(place) and (phrase is None or phrase.search(message))
    ]
    best = max((claim[:2] for claim in claims), default=None)
    return list(dict.fromkeys(section for *strength, section in claims if tuple(strength) == best))


def section_of(error: BaseException) -> str | None:
    """The section about an error, or None if neither its words nor the module of lrpfx that raised it tell."""
    modules = [str(frame.f_globals.get("__name__")) for frame in _frames(error.__traceback__)]
    raised_in = next((name for name in reversed(modules) if name.split(".")[0] == "lrpfx"), "lrpfx")
    return next(iter(sections_of(str(error), raised_in)), None)


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


@cache
def _claims() -> list[tuple[str, str, re.Pattern[str] | None]]:
    """The section, the start of the module's name, and the phrase of each claim."""
    found = []
    for section, claims in SECTIONS.items():
        for claim in claims:
            place, _, phrase = claim.partition(": ")
            found.append((section, f"lrpfx.{place}." if place else "lrpfx.", re.compile(phrase) if phrase else None))
    return found
