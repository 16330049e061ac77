"""docs/deploy: versions and bounds of conda's, Spack's and EasyBuild's files are the project's.

Spack and EasyBuild are not installed: their files are run with stand-ins for the names that they
use, in which a wrong name or argument is an error. Where rattler-build is, it renders the recipe.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from checkout import ROOT

import hpctrain as ht
from hpctrain.core.config import toml

yaml = pytest.importorskip("yaml", reason="comes with the extra `test`")

DEPLOY = ROOT / "docs" / "deploy"
RECIPE = DEPLOY / "recipe.yaml"
PACKAGE = DEPLOY / "spack_repo" / "hpctrain" / "packages" / "py_hpctrain" / "package.py"
(EASYCONFIG,) = DEPLOY.glob("*.eb")
PYPROJECT = toml.parse((ROOT / "pyproject.toml").read_text(), "pyproject.toml")
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
SCRIPTS = PROJECT["scripts"]


def bounds(lines: list[str]) -> dict[str, str]:
    """Return {package, as every index takes it: lower bound} of requirements."""
    parts = [re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line) for line in lines]
    return {dashed(part[1]): part[2] for part in parts if part}


def dashed(name: str) -> str:
    return name.lower().replace("_", "-")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


DEPENDENCIES = bounds(PROJECT["dependencies"])
BUILD = bounds(PYPROJECT["build-system"]["requires"])
PYTHON = PROJECT["requires-python"].removeprefix(">=")


def test_conda_recipe():
    text = RECIPE.read_text().replace("${{ version }}", ht.__version__)
    recipe = yaml.safe_load(text)
    assert recipe["context"]["version"] == ht.__version__
    assert recipe["source"]["path"].endswith(f"dist/hpctrain-{ht.__version__}.tar.gz")
    host, run = (
        {dashed(name): bound for name, bound in re.findall(r"^([\w-]+) >=([\d.]+)$", lines, re.M)}
        for lines in map("\n".join, (recipe["requirements"]["host"], recipe["requirements"]["run"]))
    )
    assert run == DEPENDENCIES | {"python": PYTHON}
    assert host == BUILD | {"python": PYTHON}
    points = dict(line.split(" = ") for line in recipe["build"]["python"]["entry_points"])
    assert points == SCRIPTS
    assert recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["license_file"] == PROJECT["license-files"]


def test_rattler_build_renders_the_recipe():
    rattler_build = pytest.importorskip("rattler_build", reason="pip install py-rattler-build")
    (variant,) = rattler_build.Stage0Recipe.from_file(str(RECIPE)).render()
    rendered = variant.recipe.to_dict()
    assert rendered["package"] == {"name": "hpctrain", "version": ht.__version__}


class Spack:
    """Directives of Spack as they are called, and the modules that a package imports."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.variants: set[str] = set()
        self.depends: dict[str, dict[str, str]] = defaultdict(dict)  #: by condition
        self.kinds: list[Any] = []

    def version(self, name: str, *, sha256: str = "0" * 64) -> None:
        assert re.fullmatch(r"[0-9a-f]{64}", sha256)
        self.versions.append(name)

    def variant(self, name: str, *, default: bool, description: str) -> None:
        assert default is False and description
        self.variants.add(name)

    def depends_on(self, spec: str, *, when: str = "", type: Any = None) -> None:
        name, bound = re.fullmatch(r"(?:py-)?([a-z0-9-]+)@([\d.]+):", spec).groups()
        self.depends["build" if type == "build" else when][name] = bound

    def license(self, name: str, *, checked_by: str) -> None:
        assert name == PROJECT["license"]

    @contextmanager
    def default_args(self, *, type: Any):
        assert type == ("build", "run")
        yield

    def modules(self) -> dict[str, ModuleType]:
        names = ("spack", "spack.package", "spack_repo", "spack_repo.builtin")
        names += ("spack_repo.builtin.build_systems", "spack_repo.builtin.build_systems.python")
        modules = {name: ModuleType(name) for name in names}
        modules[names[-1]].PythonPackage = type("PythonPackage", (), {})
        for directive in ("version", "variant", "depends_on", "license", "default_args"):
            setattr(modules["spack.package"], directive, getattr(self, directive))
        return modules


def run_package(monkeypatch, text: str) -> tuple[Spack, type]:
    spack, names = Spack(), {"__file__": str(PACKAGE)}
    for name, module in spack.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    exec(compile(text, str(PACKAGE), "exec"), names)
    return spack, names["PyHpctrain"]


def check_package(spack: Spack, package: type) -> None:
    """Compare a Spack package with pyproject.toml."""
    assert spack.versions == [ht.__version__]
    assert package.url == f"file://{ROOT}/dist/hpctrain-{ht.__version__}.tar.gz"
    assert package.__doc__ == PROJECT["description"] + "."
    depends = dict(spack.depends)
    assert depends.pop("build") == BUILD
    assert depends.pop("") | depends.pop("^python@:3.10") == DEPENDENCIES | {"python": PYTHON}
    assert depends == {f"+{name}": bounds(EXTRAS.get(name, [])) for name in spack.variants}


def test_spack_package(monkeypatch):
    check_package(*run_package(monkeypatch, PACKAGE.read_text()))
    repo = yaml.safe_load((PACKAGE.parents[2] / "repo.yaml").read_text())["repo"]
    assert repo == {"namespace": PACKAGE.parents[2].name, "api": "v2.0"}


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("py-click@8.1:", "py-click@8.0:"),
        ("py-click@8.1:", "py-click@8.1"),
        ('        depends_on("py-rich@13.7:")\n', ""),
        ('variant("zarr"', 'variant("zar"'),
        ('when="+report"', 'when="+hdf5"'),
        ("hatchling@1.27:", "hatchling@1.26:"),
        ('version("0.1.0")', 'version("0.1.1")'),
        ("depends_on(", "depend_on("),
    ],
)
def test_a_planted_error_of_a_spack_package_fails(monkeypatch, good, bad):
    text = PACKAGE.read_text()
    assert good in text
    with pytest.raises((AssertionError, AttributeError, NameError)):
        check_package(*run_package(monkeypatch, text.replace(good, bad, 1)))


#: constants of EasyBuild that an easyconfig may name
CONSTANTS = {"SOURCE_TAR_GZ": "%(name)s-%(version)s.tar.gz"}
KEYS = (
    "easyblock name version homepage description toolchain sources builddependencies dependencies "
    "sanity_check_paths sanity_check_commands moduleclass"
)


def check_easyconfig(text: str) -> None:
    """Compare an easyconfig with pyproject.toml; comments name what bundles bring."""
    names = {"__builtins__": {}, **CONSTANTS}
    exec(compile(text, str(EASYCONFIG), "exec"), names)
    values = {key: value for key, value in names.items() if key not in {"__builtins__", *CONSTANTS}}
    assert {*values} == {*KEYS.split()}
    toolchain = "-".join(values["toolchain"].values())
    assert EASYCONFIG.name == f"{values['name']}-{values['version']}-{toolchain}.eb"
    assert (values["version"], values["description"]) == (ht.__version__, PROJECT["description"])
    brought = re.findall(
        r"([\w-]+) (\d+(?:\.\d+)+)", "\n".join(re.findall(r"^ +# (.*)", text, re.M))
    )
    present = {dashed(name): version for name, version in [*brought, *values["dependencies"]]}
    missing = [
        name
        for name, bound in {**DEPENDENCIES, **bounds(EXTRAS["report"]), "python": PYTHON}.items()
        if name != "tomli" and numbers(present.get(name, "0")) < numbers(bound)
    ]
    build = {name: numbers(version) for name, version in values["builddependencies"]}
    missing += [name for name, bound in BUILD.items() if build.get(name, (0,)) < numbers(bound)]
    assert missing == []
    assert {f"bin/{name}" for name in SCRIPTS} < {*values["sanity_check_paths"]["files"]}


def test_easyconfig():
    check_easyconfig(EASYCONFIG.read_text())


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("'mpi4py', '4.1.0'", "'mpi4py', '4.0.1'"),
        ("rich 14.1.0, ", ""),
        ("'matplotlib', '3.10.5'", "'matplotlib', '3.7.2'"),
        ("'hatchling', '1.27.0'", "'hatchling', '1.25.0'"),
        ("version = '0.1.0'", "version = '0.1.1'"),
        ("SOURCE_TAR_GZ", "SOURCE_TARGZ"),
        ("sources =", "source ="),
    ],
)
def test_a_planted_error_of_an_easyconfig_fails(good, bad):
    text = EASYCONFIG.read_text()
    assert good in text
    with pytest.raises((AssertionError, NameError)):
        check_easyconfig(text.replace(good, bad))


NOT_BUILT = re.compile(r"\bnot (?:built|run)\b")
UNLISTED = {"README.md", "repo.yaml"}
ROW = re.compile(r"^\| \[[\w.-]+\]\((.*?)\) \|.*\|(.*)\|$", re.MULTILINE)


def test_the_readme_lists_all_files_and_headers_say_which_were_not_built():
    rows = dict(ROW.findall((DEPLOY / "README.md").read_text()))
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.name not in UNLISTED]
    assert {*rows} == {str(path.relative_to(DEPLOY)) for path in files}
    for name, state in rows.items():
        header = re.match(r"(?:#.*\n)+", (DEPLOY / name).read_text())[0].lower()
        assert bool(NOT_BUILT.search(state)) == bool(NOT_BUILT.search(header)), name
