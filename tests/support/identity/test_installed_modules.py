"""Which modules are of Python itself or of installed packages."""

import pytest

from lrpfx.support.identity.installed_modules import is_installed


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("json", True),
        ("sys", True),
        ("pytest", True),
        ("numpy.linalg", True),
        (__name__, False),
        ("__main__", False),
        ("no", False),
    ],
)
def test_modules(name, expected):
    assert is_installed(name) == expected
