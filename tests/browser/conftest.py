"""The option of the browser's tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", help="write the pictures of the docs into this folder")
