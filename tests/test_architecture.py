"""The table of docs/architecture.md ("Layers"), checked by reading the imports; and what the source must never hold."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "diloco_cli"
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "_share" not in p.parts)
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}

CLOCKS_AND_IO = set(
    "asyncio socket ssl threading multiprocessing subprocess time random secrets logging os pathlib io select "  # noqa: SIM905
    "signal queue concurrent tempfile shutil".split()
)


def layer(module: str) -> str:
    """The row of the table that a module belongs to."""
    parts = module.split(".")[1:]
    name = ".".join(parts)
    if name in ("", "errors") or name in ("config.schema", "config.quantities"):
        return "bottom"
    if name in ("core.merge", "sim.learn"):
        return name
    if parts[0] == "config":
        return "config.compose"
    return parts[0]


# What each row may import of ours, as prefixes below diloco_cli.
ALLOWED = {
    "bottom": ("errors", "config.schema", "config.quantities"),
    "core": ("core", "errors"),
    "core.merge": ("core", "errors"),
    "wire": ("wire", "core", "errors"),
    "train": ("train", "core", "config.schema", "config.quantities", "errors"),
    "run": (
        "run",
        "train",
        "wire",
        "core",
        "config.schema",
        "config.quantities",
        "config.presets",
        "errors",
        "observe.events",
    ),
    "sim": ("sim", "run.settings", "core", "config.schema", "config.quantities", "errors", "observe.events"),
    # The one module of sim that trains.
    "sim.learn": (
        "sim",
        "train",
        "wire.codecs",
        "run.global_model",
        "run.settings",
        "core",
        "config.schema",
        "config.quantities",
        "errors",
    ),
    "observe": ("observe", "core", "config.schema", "config.quantities", "errors"),
    "config.compose": ("config", "errors"),
}
# The launcher is the process that has the screen (docs/architecture.md, "Processes of a run").
ALLOWED_TO_ONE = {"run.launcher": ("observe.dashboard", "observe.sinks", "observe.view", "observe.summary")}
# Installed packages that may only be imported in some places (prefixes).
ONLY_IN = {
    "typer": ("cli",),
    "click": ("cli",),
    "rich": ("cli", "observe"),
    "hydra": ("config.compose", "cli"),
    "omegaconf": ("config", "cli"),
    "torch": ("core.merge", "wire.codecs", "train", "run", "sim.learn", "observe", "cli", "examples"),
    "torch.distributed": ("train", "run"),
    "cryptography": ("run",),
}


def imports(path: Path, *, lazy: bool = True) -> Iterator[tuple[str, int]]:
    """Every imported module with its line; `from a import b` gives a and a.b. Without lazy: at module level only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not lazy and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            skipped.update(ast.walk(node))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(n for child in node.body for n in ast.walk(child))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


@pytest.mark.parametrize("module", MODULES)
def test_layers(module: str) -> None:
    row = layer(module)
    if row not in ALLOWED:
        return
    allowed = ALLOWED[row] + ALLOWED_TO_ONE.get(module.removeprefix("diloco_cli."), ())
    wrong = [
        f"line {line}: {name}"
        for name, line in imports(MODULES[module])
        if name.split(".")[0] == "diloco_cli" and not within(name.removeprefix("diloco_cli."), allowed)
        if name not in ("diloco_cli.__version__", "diloco_cli")
    ]
    assert not wrong, f"{module} ({row}) may not import {wrong}"


@pytest.mark.parametrize("module", MODULES)
def test_packages_only_where_they_belong(module: str) -> None:
    inside = module.removeprefix("diloco_cli").lstrip(".")
    wrong = [
        f"line {line}: {name}"
        for name, line in imports(MODULES[module])
        for package, places in ONLY_IN.items()
        if within(name, (package,)) and not within(inside, places)
    ]
    assert not wrong, f"{module} may not import {wrong}"


@pytest.mark.parametrize("module", [m for m in MODULES if layer(m) in ("bottom", "core", "core.merge")])
def test_core_and_bottom_are_pure(module: str) -> None:
    core = layer(module) != "bottom"
    wrong = []
    for name, line in imports(MODULES[module]):
        top = name.split(".")[0]
        if core and top in CLOCKS_AND_IO:
            wrong.append(f"line {line}: {name}")
        # OmegaConf inside functions of config.schema only, as its docstring says; torch in core.merge only.
        known = {"diloco_cli", "torch"} if module.endswith("core.merge") else {"diloco_cli"}
        known |= {"omegaconf", "yaml"} if module.endswith("config.schema") else set()
        if top not in sys.stdlib_module_names and top not in known:
            wrong.append(f"line {line}: {name}")
    assert not wrong, f"{module} may not import {wrong}"


@pytest.mark.parametrize("module", [m for m in MODULES if within(m, ("diloco_cli.wire",))])
def test_wire_is_free_of_io(module: str) -> None:
    wrong = [name for name, _ in imports(MODULES[module]) if name.split(".")[0] in ("socket", "asyncio", "ssl")]
    assert not wrong


@pytest.mark.parametrize("module", [m for m in MODULES if within(m, ("diloco_cli.cli",))])
def test_the_command_line_imports_heavy_things_lazily(module: str) -> None:
    heavy = ("torch", "hydra", "omegaconf", "rich", "numpy", "diloco_cli.run", "diloco_cli.train", "diloco_cli.wire")
    wrong = [f"line {n}: {name}" for name, n in imports(MODULES[module], lazy=False) if within(name, heavy)]
    assert not wrong, f"{module} imports {wrong} at its top"


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("numpy", "load"),
    ("np", "load"),
    ("os", "system"),
    ("hydra.utils", "instantiate"),
}
FORBIDDEN_MODULES = (
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "hydra.utils.instantiate",
)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_received_can_run(module: str) -> None:
    """Traps, Security: no pickle for wire or resume, no evaluation, no unsafe load (torch.save pickles, too)."""
    path = MODULES[module]
    wrong = [f"line {line}: {name}" for name, line in imports(path) if within(name, FORBIDDEN_MODULES)]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, attribute = called.rpartition(".")
        if called in FORBIDDEN_CALLS or (owner, attribute) in FORBIDDEN_ATTRIBUTES or called == "torch.save":
            wrong.append(f"line {node.lineno}: {called}")
        for keyword in node.keywords:
            truthy = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            if keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and truthy:
                wrong.append(f"line {node.lineno}: {keyword.arg}=True")
    assert not wrong, f"{module}: {wrong}"


def test_every_module_says_what_it_owns() -> None:
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if path.name == "__init__.py" and not text.strip():
            continue
        assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"


def test_the_checker_sees_a_breach(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("import time\n\ndef f():\n    from torch import distributed\n", encoding="utf-8")
    assert [name for name, _ in imports(file)] == ["time", "torch.distributed"]
    assert [name for name, _ in imports(file, lazy=False)] == ["time"]
    assert within("torch.distributed", ("torch",))
    assert not within("torchvision", ("torch",))
