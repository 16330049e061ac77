"""What the site does to the pages beside rendering them: a hook of MkDocs, and one of griffe.

A picture or a JSON file that a page links to is copied into the site. A link to any other file
outside of docs/ leads to the repository at HPCTRAIN_URL, as in setup.py; without this address it
becomes plain text. The pages of the API are made here, so that docs/ has no page that a plain git
host cannot show.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
COPIED = (".json", ".png")
#: what tests read after the language of a fence
FENCE = re.compile(r"^( *```\w+) .*$", re.MULTILINE)
#: code, in which nothing is a link, or a link: its mark, text, target and anchor
LINK = re.compile(
    r"^ *```.*?^ *```$|`[^`]*`|(!?)\[((?:`[^`]*`|[^][`])*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)
#: page of the API: the package or module whose `__all__` it shows
API = {
    "ht": "hpctrain",
    "ht.nn": "hpctrain.nn",
    "ht.optim": "hpctrain.optim",
    "ht.optim.schedules": "hpctrain.optim.schedules",
    "ht.engines": "hpctrain.engines",
    "ht.data": "hpctrain.data",
    "ht.callbacks": "hpctrain.training.callbacks",
    "ht.loggers": "hpctrain.training.loggers",
    "ht.metrics": "hpctrain.nn.metrics",
    "ht.parallel": "hpctrain.parallel",
    "ht.slurm": "hpctrain.cluster.jobs",
    "ht.torch": "hpctrain.torch",
    "ht.jax": "hpctrain.jax",
    "horovod.torch": "hpctrain.horovod.torch",
}
#: names of these `__all__` that only the package uses, and Horovod's numbers of its reductions
INTERNAL = {
    "AdamWOptions", "BoundMetrics", "Callbacks", "CnnOptions", "ConstantOptions", "CosineOptions",
    "DATA", "ENGINES", "Engine", "EpochOrder", "Flags", "FunctionData", "FunctionModel", "LOSSES",
    "LambOptions", "LarsOptions", "MODELS", "MlpOptions", "OPTIMIZERS", "Prefetch",
    "ResNetOptions", "SCHEDULES", "Sampler", "SelectedSamples", "SgdOptions", "Source",
    "StepOptions", "Task", "Times", "TransformerOptions", "Work", "add", "as_loss",
    "batches_to_read_ahead", "blocks_of", "check_metrics", "dropped_batch", "has_known_targets",
    "in_pieces", "initial_values", "is_name", "known_targets", "must_fit", "order", "order_of",
    "path_keys", "read", "reading_of", "register", "resize_training_set", "share", "unwrap",
    "updates_per_step", "Adasum", "Average", "Max", "Min", "Product", "Sum",
}  # fmt: skip
#: pages that show the arguments of their classes alone, and the classes whose members users call
ARGUMENTS_ALONE = {"ht.nn", "ht.engines", "ht.parallel", "ht.torch", "ht.jax"}
WITH_MEMBERS = {"ht.nn.Layer", "ht.nn.Loss", "ht.nn.Model", "ht.torch.Trainer", "ht.jax.Trainer"}


class OptionsClasses(griffe.Extension):
    """Shows classes decorated with `core.config.options` as the dataclasses that they are."""

    def on_class_instance(self, *, cls, **_):
        for decorator in cls.decorators:
            if str(decorator.value).endswith("options"):
                function = griffe.ExprName("dataclasses.dataclass")
                keywords = [griffe.ExprKeyword("kw_only", "True")]
                decorator.value = griffe.ExprCall(function, keywords)


def source_of(module: str) -> Path:
    """Return the file of a module or a package."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(module: str) -> list[str]:
    """Return the names of `__all__` that have a place on the module's page."""
    for node in ast.parse(source_of(module).read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            names = ast.literal_eval(node.value)
    return [x for x in names if x not in INTERNAL and f"ht.{x}" not in API]


def api_page(title: str, module: str) -> str:
    """Return a page with the docstrings of a module and of its public names."""
    page = f"# {title}\n\n::: {module}\n    options:\n      members: false\n"
    page += "      show_root_heading: false\n      show_root_toc_entry: false\n"
    for name in public_names(module):
        page += f"\n::: {module}.{name}\n    options:\n      heading: {title}.{name}\n"
        page += f"      toc_label: {name}\n"
        is_short = title in ARGUMENTS_ALONE or name.endswith("Options")
        if is_short and f"{title}.{name}" not in WITH_MEMBERS:
            page += "      members: false\n      inherited_members: false\n"
    return page


def on_files(files, config):
    """Add the pages of the API."""
    for title, module in API.items():
        content = api_page(title, module)
        files.append(File.generated(config, f"api/{title}.md", content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Return the page with plain fences, lists as Python-Markdown reads them, and links mended."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    address = os.environ.get("HPCTRAIN_URL", "").rstrip("/")

    def mend(match):
        mark, text, target, anchor = match.groups()
        path = (folder / (target or ".")).resolve()
        if not target or not path.exists():
            return match[0]
        if text == target and path.suffix == ".md":  # a page has a title on the site
            text = path.read_text().partition("\n")[0].removeprefix("# ")
        if path.is_relative_to(ROOT / "docs"):
            return f"{mark}[{text}]({target}{anchor or ''})"
        file = path.relative_to(ROOT).as_posix()
        if path.suffix in COPIED:
            if files.get_file_from_path(file) is None:
                files.append(File.generated(config, file, abs_src_path=str(path)))
            return f"{mark}[{text}]({os.path.relpath(ROOT / 'docs' / file, folder)})"
        return f"[{text}]({address}/blob/v{version()}/{file}{anchor or ''})" if address else text

    return LINK.sub(mend, indented(FENCE.sub(r"\1", markdown)))


def version() -> str:
    """Return the version of the package, whose tag the repository has."""
    return re.search(r'__version__ = "(.*)"', source_of("hpctrain").read_text())[1]


def indented(markdown: str) -> str:
    """Return the page with what belongs to an item of a list indented by 4, not by its marker."""
    result, marker, in_fence = [""], 0, False
    for line in markdown.splitlines():
        follows_text = result[-1] and not marker
        item = re.match(r"(?:-|1\.) " if follows_text else r"(?:-|\d+\.) ", line)
        in_fence ^= line.startswith("```")
        if in_fence or (line and not item and line[0] != " "):
            marker = 0
        elif item:
            if follows_text or result[-1].lstrip().startswith(("|", "```")):
                result.append("")
            marker = len(item[0])
        elif line and marker:
            line = " " * (4 - marker) + line
        result.append(line)
    return "\n".join(result)
