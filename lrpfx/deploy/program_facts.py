"""What `lower` attaches to a program: the facts for a manifest, and arguments with which it was compared."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch.export import ExportedProgram

from lrpfx.deploy.job import Job
from lrpfx.deploy.program import checked
from lrpfx.deploy.program_sizes import OpenSize
from lrpfx.passes.program import Program
from lrpfx.runtime.compiled_graph import HISTORY
from lrpfx.runtime.rule_table import rule_table
from lrpfx.support.identity.fingerprints import fingerprint_of_tensors, other_buffers

MANIFEST, _EXAMPLES, _OPEN = "lrpfx", "lrpfx_examples", "lrpfx_open_sizes"  # keys of a program's metadata


def with_facts(
    job: Job,
    program: ExportedProgram,
    lowered: Program,
    examples: Sequence[Sequence[torch.Tensor]],
    opened: Sequence[OpenSize],
    dimensions: Mapping[str, Mapping[int, OpenSize | None]],
    tolerance: float,
) -> ExportedProgram:
    """Attach the facts for a manifest, the arguments with which the program was compared, and the history."""
    names, shared = job.names(), []
    admitted = [one for one in examples[1:] if _fit(job.inputs, one, opened)]
    for one in (one for one in opened if not one.is_batch):
        of = [[name, number] for name in names for number, size in dimensions[name].items() if size and size.of == one.of]
        shared.append({"of": of, "lower": one.lower, "upper": one.upper})
    rows = rule_table(job.module.unfused_graph)
    stages = job.module.compiled.history
    program.graph_module.meta[MANIFEST] = {
        "lrpfx": version("lrpfx"),
        "title": job.module.title,
        "weights": fingerprint_of_tensors(job.module.state_dict()),
        "buffers": {name: one for name, one in other_buffers(job.module).items() if name not in job.module.compiled.derived},
        "composite": job.module.composite,
        "canonizers": [stage.name for stage in stages if stage.stage == "canonize" and stage.matches],
        "target": job.target,
        "explained": None if job.fixed is None else {"target": str(job.fixed), "sizes": list(job.fixed.least_sizes())},
        "reduce": job.reduce,
        "dynamic_batch": any(one.is_batch for one in opened),
        "sizes": shared,
        "conditions": {name: place if isinstance(place, str) else list(place) for place, name in job.conditions.items()},
        "masks": [name for name, of in zip(names, job.inputs, strict=False) if of in job.masks],
        "tolerance": tolerance,
        "rules": {row.name: row.rule for row in rows},
        "merged": {row.name: list(row.merged) for row in rows if row.merged},
    }
    program.graph_module.meta[_EXAMPLES] = [dict(zip(names, one, strict=True)) for one in (examples[0], *admitted)]
    program.graph_module.meta[_OPEN] = {name: sorted(numbers) for name, numbers in dimensions.items()}
    program.graph_module.meta[HISTORY] = tuple(lowered.history)
    sizes = {
        name: [None if number in dimensions[name] else size for number, size in enumerate(example.shape)]
        for name, example in zip(names, examples[0], strict=True)
    }
    return checked(program, sizes, shared)


def _fit(names: Sequence[str], arguments: Sequence[torch.Tensor], opened: Sequence[OpenSize]) -> bool:
    """Whether arguments have sizes within the limits that the open sizes have in the end."""
    values = dict(zip(names, arguments, strict=False))
    known = [(one, values[name].shape[number]) for one in opened for name, number in one.of if name in values]
    return all(one.admits(size) for one, size in known)


def facts_of(program: ExportedProgram) -> dict[str, Any] | None:
    """The facts that `lower` attached to a program, as plain data; None for other programs."""
    facts: dict[str, Any] | None = program.graph_module.meta.get(MANIFEST)
    return facts


def argument_examples(program: ExportedProgram) -> list[dict[str, torch.Tensor]]:
    """Arguments, by name, with which `lower` verified the program: of the example's sizes, and of others that it takes."""
    examples: list[dict[str, torch.Tensor]] = program.graph_module.meta[_EXAMPLES]
    return examples


def open_dimensions(program: ExportedProgram) -> dict[str, list[int]]:
    """The dimensions that may vary of each argument and result of a program, by name."""
    found: dict[str, list[int]] = program.graph_module.meta[_OPEN]
    return found
