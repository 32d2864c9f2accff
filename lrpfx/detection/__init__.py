"""Detectors, and segmenters of queries: modules up to their raw heads, in one form for all families."""

from lrpfx.detection.choice import heads, is_detector
from lrpfx.detection.detector_heads import DetectorHeads, RawHeads
from lrpfx.detection.of_masks import SemanticMap, semantic_map

__all__ = ["DetectorHeads", "RawHeads", "SemanticMap", "heads", "is_detector", "semantic_map"]
