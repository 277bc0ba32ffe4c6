"""What pyproject.toml cannot say: the example configurations, at the top of the repository, are a folder of the package."""

from setuptools import find_namespace_packages, setup

setup(packages=[*find_namespace_packages(include=["opfuse*"]), "opfuse.configs"], package_dir={"opfuse.configs": "configs"})
