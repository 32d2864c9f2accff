"""The release of lrpfx."""

__version__ = "0.1.0"
