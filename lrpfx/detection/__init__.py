"""Detectors: modules up to their raw heads, in one form for all families."""

from lrpfx.detection.choice import heads, is_detector
from lrpfx.detection.detector_heads import DetectorHeads, RawHeads

__all__ = ["DetectorHeads", "RawHeads", "heads", "is_detector"]
