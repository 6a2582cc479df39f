from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import etude


def test_every_public_name_is_there():
    for name in etude.__all__:
        assert getattr(etude, name) is not None
    assert dir(etude) == sorted(etude.__all__)
    assert set(etude.__all__) - {"__version__"} == etude._HOMES.keys()


@pytest.mark.parametrize("name", sorted(etude._HOMES))
def test_a_name_is_its_homes(name: str):
    assert getattr(etude, name) is getattr(import_module(etude._HOMES[name]), name)


def test_an_unknown_name_lists_the_public_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'trian'; public names: .*train"):
        etude.trian  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def test_importing_it_imports_nothing():
    program = (
        "import sys, etude; print([name for name in ('torch', 'pydantic', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
