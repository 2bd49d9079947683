"""Builds the package; what it is called and needs stands in pyproject.toml."""

from setuptools import setup

setup()
