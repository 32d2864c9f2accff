"""The release of lrpfx, and where its documentation is."""

__version__ = "0.1.0"

#: The address of the documentation, without a slash at the end.
DOCUMENTATION = "https://lrpfx.readthedocs.io/en/stable"
