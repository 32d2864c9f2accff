"""A table of damaged and crafted files of each format: how many are refused, and the outcome of the rest.

Run as a program, it writes the table in docs/deploying.md.
"""

import random
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import onnx
import torch
import torchvision_cpu  # noqa: F401  # before torchvision, which needs it with a CPU build of torch
from crafted_files import IN_FILES, IN_MODELS, UNCHECKED, program_that_calls, resigned, signed
from helpers import small_net

import lrpfx
from lrpfx.composites import EpsilonPlusFlat
from lrpfx.deploy import archive

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "deploying.md"
BEGIN, END = "<!-- attacks -->", "<!-- end of attacks -->"
OUTCOMES = ("refused", "harmless", "wrong")


def flipped(content, generator):
    changed = bytearray(content)
    changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def truncated(content, generator):
    return content[: generator.randrange(len(content))]


def zeroed(content, generator):
    start = generator.randrange(len(content))
    end = min(len(content), start + generator.randrange(1, 4096))
    return content[:start] + bytes(end - start) + content[end:]


def repeated(content, generator):
    start = generator.randrange(len(content))
    return content[:start] + content[max(0, start - 1000) : start] + content[start:]


DAMAGES = {"one bit flipped": flipped, "truncated": truncated, "a range zeroed": zeroed, "a range duplicated": repeated}


def outcome(path, content, arguments, expected):
    """ "refused", "harmless" if the results are the same, or "wrong"."""
    path.write_bytes(content)
    try:
        results = lrpfx.load(path)(*arguments)
    except lrpfx.LrpfxError:
        return "refused"
    same = results.keys() == expected.keys() and all(torch.equal(results[name], expected[name]) for name in expected)
    return "harmless" if same else "wrong"


def measure(each=250):
    """Rows: format, change to the file, and the outcomes."""
    torch.manual_seed(0)
    explain_model = lrpfx.transform(small_net().float(), EpsilonPlusFlat())
    program = lrpfx.lower(explain_model, torch.rand(2, 3, 8, 8))
    arguments = torch.rand(3, 3, 8, 8), torch.arange(3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {
            ".pt2": lrpfx.save(program, folder / "exported.pt2"),
            ".onnx": lrpfx.save(program, folder / "model.onnx"),
            "AOTInductor": lrpfx.package(program, folder / "compiled.pt2"),
        }
        for kind, original in files.items():
            expected, content = lrpfx.load(original)(*arguments), original.read_bytes()
            for what, damage in DAMAGES.items():
                generator = random.Random(0)
                path = folder / f"changed{original.suffix}"
                found = [outcome(path, damage(content, generator), arguments, expected) for _ in range(each)]
                yield kind, what, found
        entries = archive.read_archive(files[".pt2"].read_bytes())
        found = []
        for change in IN_FILES.values():
            marker = folder / "marker"
            changed = archive.archive_of(signed({**entries, **change(entries, marker)}))
            found.append(outcome(folder / "signed.pt2", changed, arguments, {}))
            found[-1] = "wrong" if marker.exists() else found[-1]
        yield ".pt2", "crafted to run code, with correct hashes", found
        programs = (program_that_calls(entries, *call) for call in UNCHECKED.values())
        found = [outcome(folder / "signed.pt2", content, arguments, {}) for content in programs]
        yield ".pt2", "crafted to call operators that read unchecked, with correct hashes", found
        found = []
        for change, _ in IN_MODELS.values():
            model = onnx.load(files[".onnx"])
            change(model)
            found.append(outcome(folder / "signed.onnx", resigned(model), arguments, {}))
        yield ".onnx", "crafted to take memory or time without end, with correct hashes", found


def table(rows):
    lines = ["| format | change to the file | tried | refused | harmless | wrong |", "|---|---|---:|---:|---:|---:|"]
    for kind, what, found in rows:
        counts = " | ".join(str(found.count(one)) for one in OUTCOMES)
        lines.append(f"| {kind} | {what} | {len(found)} | {counts} |")
    return "\n".join(lines)


def main():
    warnings.simplefilter("ignore")
    text = table(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 250))
    print(text)
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
