from setuptools import setup  # metadata and all settings: pyproject.toml

setup()
