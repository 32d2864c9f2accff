"""What LXT 2.1, which was written for transformers 4, needs under transformers 5. No computation of LXT is changed.

Like LXT's own patches, all of this changes transformers for the whole process.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from lrpfx.demo import torchvision_cpu  # noqa: F401  # before transformers, which imports torchvision if it is there

from transformers import BertConfig, PreTrainedModel, pytorch_utils  # isort: skip


def supply_what_was_removed() -> None:
    """Supply names of transformers 4 that LXT imports and reads. To be called before LXT is imported."""
    for name in ("find_pruneable_heads_and_indices", "prune_linear_layer"):
        if not hasattr(pytorch_utils, name):
            setattr(pytorch_utils, name, None)  # only read when heads are removed
    removed: dict[type, dict[str, Any]] = {
        BertConfig: {"position_embedding_type": "absolute", "use_return_dict": True},
        PreTrainedModel: {"get_head_mask": lambda self, head_mask, layers: [None] * layers},
    }
    for owner, members in removed.items():
        for name, value in members.items():
            setattr(owner, name, value)


class _Table(dict[str, Any]):
    """A table of attention functions that transformers 5 can read; LXT replaces it by a plain dict."""

    def get_interface(self, name: str, default: Any) -> Any:
        return self.get(name, default)


def let_patches_be_read() -> None:
    """Let `lxt.efficient.monkey_patch` be called as its documentation says. After `supply_what_was_removed`."""
    import lxt.efficient  # after what it needs

    original = lxt.efficient.monkey_patch

    def monkey_patch(module: ModuleType, patch_map: Mapping[Any, Callable[..., Any]]) -> None:
        original(module, patch_map=patch_map)
        _make_readable(module)

    lxt.efficient.monkey_patch = monkey_patch


def patch(module: ModuleType, rules: Mapping[Any, Callable[..., Any]]) -> None:
    """Replace methods and functions of a module of transformers by LXT's. Models made afterwards have them."""
    from lxt.efficient import monkey_patch  # after what it needs

    monkey_patch(module, patch_map=rules)
    _make_readable(module)


def _make_readable(module: ModuleType) -> None:
    table = getattr(module, "ALL_ATTENTION_FUNCTIONS", None)
    if type(table) is dict:
        module.ALL_ATTENTION_FUNCTIONS = _Table(table)  # type: ignore[attr-defined]
