"""The house's plan, held by reading the code: which module may know which, and what no module may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "summit_train"

# The floors, from the ground up: a module may import its own floor and those below it. A module of a task is on the
# highest floor that it imports.
FLOORS = (
    "core", "spec", "optim", "models", "counts", "data", "plan", "evaluation", "training", "scaling", "report",
    "inference", "cluster", "bench", "sweep", "cli", "__main__",
)  # fmt: skip
# The rooms of data/, likewise; data.motion stands beside them.
DATA_ROOMS = ("video", "manifest", "loading", "check", "packed", "batches", "dataset", "bad_clips")
# A feature is a folder that no other module imports.
FEATURES = ("inference.cam", "inference.export", "inference.stream")

# Libraries that only these modules may import.
OWNERS = {
    "yaml": {"spec.source"},
    "horovod": {"core.comm.horovod_world", "cluster.probe"},
    "mpi4py": {"core.comm.horovod_world", "core.comm.rendezvous", "cluster.probe"},
    "torch.distributed": {"core.comm.rendezvous", "core.comm.torch_world"},
    "av": {"data.video", "cluster.probe"},
    "cv2": {"data.video.flow"},
    "PIL": {"data.video.pictures", "data.video.encode", "data.video.rand_augment"},
    "mlflow": {"report.sinks"},
    "onnx": {"inference.export.onnx_file"},
    "onnxruntime": {"inference.export.onnx_file"},
    "onnxscript": {"inference.export.onnx_file"},
    "safetensors": {"core.saved"},
    "wandb": {"report.sinks"},
}

# Everything else must be importable on a machine without torch.
NEEDS_TORCH = re.compile(
    r"core\.(device|saved).*|models.*|evaluation\.(?!fuse|measures|scores).*|training\.(?!buckets).*|"
    r"tasks\.\w+\.(geometry|detect|loss|pooling|proposals|rfcn|scoring|stream)|"
    r"inference\..*|optim\.(?!schedule).*|data\.video\.own_augment|bench\..*|"
    r"cluster\.(doctor.*|node_check)|cli\.(baseline|pipeline|train|evaluate|predict|model)"
)

# Who may print: the commands, and what fails or speaks for them.
MAY_PRINT = re.compile(
    r"cli\..*|bench\.measure|cluster\.(keeper|probe)|inference\.(.*\.command|arguments)|__main__"
    r"|core\.(result|session|watch|progress)"
)


@dataclass(frozen=True)
class Module:
    """One source file; `name` is dotted and without the package: "data.order"."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def layer(self) -> str:
        return self.name.split(".")[0]

    @cached_property
    def nodes(self) -> Sequence[ast.AST]:
        return list(ast.walk(self.tree))

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@cache
def modules() -> dict[str, Module]:
    """Return the source files by their names; they are read once, by the first test."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    return found


@cache
def _imports(module: Module) -> Sequence[tuple[str, ast.AST]]:
    """Full dotted names of what is imported anywhere in the module, with the submodule where one is named."""
    found: list[tuple[str, ast.AST]] = []
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module.at(node)}: a relative import"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.append((below if below.removeprefix(f"{PACKAGE}.") in modules() else node.module, node))
    return found


def _ours(module: Module) -> Iterator[tuple[str, ast.AST]]:
    for name, node in _imports(module):
        if name.startswith(f"{PACKAGE}."):
            yield name.removeprefix(f"{PACKAGE}."), node


def test_the_reader_sees_the_imports() -> None:
    # The test of this test: modules, a name below a package, a lazy import, an import that only types need.
    assert len(modules()) > 40
    assert {"core.comm", "data.batches.loader", "core.rng"} <= {name for name, _ in _ours(modules()["training.step"])}
    assert {"data.manifest.overlap"} <= {name for name, _ in _ours(modules()["training.preflight"])}
    assert {"horovod.torch", "mpi4py"} <= {name for name, _ in _imports(modules()["core.comm.horovod_world"])}
    assert {module.layer for module in modules().values() if module.name} == {*FLOORS, "tasks"}
    for name, floor in (("rfcn", "models"), ("boxes", "data"), ("scoring", "evaluation"), ("stream", "inference")):
        assert FLOORS[_floor(f"tasks.detection.{name}", FLOORS)] == floor


def _floor(name: str, floors: Sequence[str], within: str = "") -> int:
    """The number of a module's floor, of the package's or of those within a folder; what has none is above all."""
    if not within and f"{name}.".startswith("tasks."):
        return max((_floor(other, floors) for other, _ in _ours(modules()[name])), default=0)
    tops = (number for number, floor in enumerate(floors) if f"{name}.".startswith(f"{within}{floor}."))
    return next(tops, len(floors))


def _upward(floors: Sequence[str], within: str = "") -> list[str]:
    """Imports of a higher floor."""
    return [
        f"{module.at(node)}: {module.name} imports {name}"
        for module in modules().values()
        for name, node in _ours(module)
        if name.startswith(within) and _floor(name, floors, within) > _floor(module.name, floors, within)
    ]


def test_arrows_run_downward_only() -> None:
    assert _upward(FLOORS) == []


def test_arrows_within_data_run_downward_only() -> None:
    rooms = {module.name.split(".")[1] for module in modules().values() if module.name.startswith("data.")}
    assert rooms == {*DATA_ROOMS, "motion"}
    assert _upward(DATA_ROOMS, "data.") == []


def test_a_feature_can_be_removed_with_its_folder() -> None:
    for feature in FEATURES:
        own = f"{feature}."
        users = {m.name for m in modules().values() for name, _ in _ours(m) if f"{name}.".startswith(own)}
        part = re.compile(rf"tasks\.\w+\.{feature.split('.')[1]}")  # the feature's part in a task
        assert all(f"{user}.".startswith(own) or part.fullmatch(user) for user in users), feature


def test_a_task_is_imported_in_functions_alone() -> None:
    # Where its code is needed: tests/tasks/test_seams.py sees that the other task's runs do not load it.
    imported = [
        (module, node)
        for module in modules().values()
        if module.layer != "tasks"
        for node in module.tree.body  # neither a function's nor those that only types need
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len(imported) > 1000
    assert [module.at(node) for module, node in imported if f"{PACKAGE}.tasks" in ast.unparse(node)] == []


def test_no_two_modules_import_each_other() -> None:
    # static_order raises CycleError, which names the circle.
    graph = {module.name: {name for name, _ in _ours(module)} for module in modules().values()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules())


def test_modules_are_imported_by_name_in_main_alone() -> None:
    found = {
        module.name
        for module in modules().values()
        for node in module.nodes
        if _called(node) in ("importlib.import_module", "import_module", "__import__")
    }
    # The commands, parts of the user's own, what a worker needs, and packages that may break.
    assert found == {"__main__", "core.fork_server", "core.own_parts", "cluster.probe"}


def test_a_library_is_imported_in_one_place() -> None:
    for library, owners in OWNERS.items():
        importers = {
            m.name for m in modules().values() for name, _ in _imports(m) if f"{name}.".startswith(f"{library}.")
        }
        # An owner may be a package.
        owned = {owner: {name for name in importers if f"{name}.".startswith(f"{owner}.")} for owner in owners}
        assert all(owned.values()) and importers == set().union(*owned.values()), library


def test_what_needs_no_torch_imports_without_it() -> None:
    names = [f"{PACKAGE}.{name}" for name in modules() if name and not NEEDS_TORCH.fullmatch(name)]
    torch_free = ("spec", "sweep", "data.video.decode", "report.page", "__main__")
    assert {f"{PACKAGE}.{name}" for name in torch_free} <= set(names)
    # None in sys.modules makes Python refuse the import.
    program = (
        "import importlib, sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'horovod', 'mpi4py')))\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _called(node: ast.AST) -> str:
    """The dotted name that a call calls, or nothing."""
    if not isinstance(node, ast.Call):
        return ""
    return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""


def _calls(*names: str) -> list[tuple[Module, ast.Call]]:
    return [
        (module, node)
        for module in modules().values()
        for node in module.nodes
        if isinstance(node, ast.Call) and _called(node) in names
    ]


def test_only_commands_print_and_only_main_exits() -> None:
    assert [module.at(node) for module, node in _calls("print") if not MAY_PRINT.fullmatch(module.name)] == []
    assert {module.name for module, _ in _calls("sys.exit", "exit", "quit", "SystemExit")} == {
        "__main__",
        "cluster.keeper",  # a program of its own, which the package's other parts would slow down
    }
    # Threads that outlive the main one's patience have no other way to end the process.
    assert {module.name for module, _ in _calls("os._exit")} == {"core.comm.world", "core.fork_server"}


def test_untrusted_input_stays_data() -> None:
    loads = _calls("torch.load")
    assert loads
    for module, call in loads:
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert options.get("weights_only") == "True", module.at(call)
    # A process and its workers, whose memory nobody else can open.
    others = [module for module in modules().values() if module.name != "core.pages"]
    assert [module.at(node) for module in others for name, node in _imports(module) if name == "pickle"] == []
    # Values travel between ranks by core.comm.messages: these methods of torch's and of MPI's read pickles.
    by_pickle = {"broadcast_object_list", "gather_object", "all_gather_object", "bcast", "allgather"}
    called = [(module, node) for module in modules().values() for node in module.nodes]
    assert [m.at(node) for m, node in called if isinstance(node, ast.Attribute) and node.attr in by_pickle] == []
    runs_code = ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "pickle.load", "pickle.loads", "eval", "exec",
                 "os.system", "os.popen", "marshal.loads")  # fmt: skip
    assert [module.at(call) for module, call in _calls(*runs_code) if module in others] == []
    for module in modules().values():
        for node in module.nodes:
            if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
                assert ast.unparse(node.value) == "False", module.at(node.value)


def test_launchers_variables_are_read_in_one_place() -> None:
    variable = re.compile(r"(SLURM|SLURMD|LSB|PBS|FLUX|JSM|PMI|PMIX|MV2|OMPI_COMM)_\w+")
    readers = {
        module.name
        for module in modules().values()
        for node in module.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and variable.fullmatch(node.value)
    }
    # The launchers' ranks, and what a submission leaves out of its environment.
    assert readers == {"core.comm.launch", "cluster.scheduler", "cluster.schedulers"}


def test_an_error_of_any_kind_is_never_swallowed() -> None:
    for module in modules().values():
        for node in module.nodes:
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type else "BaseException"
            # A worker sends its errors to the process that raises them.
            if caught in ("Exception", "BaseException") and module.name != "core.workers":
                assert any(isinstance(inner, ast.Raise) for inner in ast.walk(node)), module.at(node)


MUTATORS = (
    "append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add", "discard",
)  # fmt: skip


def _root(node: ast.AST) -> str:
    """The name that `name.a[b].c` starts with, or nothing."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _written(node: ast.AST) -> str:
    """The name of what an item, an attribute or a mutating call changes, or nothing."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return _root(node.func)
    is_target = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
    return _root(node) if is_target else ""


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _writes(tree: ast.Module) -> Iterator[ast.AST]:
    """`global`, what a function changes of any name of its module, and what any line changes of another module."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    outer = [node for node in ast.walk(tree) if id(node) not in inner]
    imports = [node for node in outer if isinstance(node, ast.Import | ast.ImportFrom)]
    others = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names = others | defined | _stored(outer)
    yield from (node for node in outer if _written(node) in others)
    for function in functions:
        nodes = list(ast.walk(function))
        local = {node.arg for node in nodes if isinstance(node, ast.arg)} | _stored(nodes)
        yield from (node for node in nodes if isinstance(node, ast.Global) or _written(node) in names - local)


def test_the_reader_sees_writes_to_globals() -> None:
    for body, found in (
        ("global KNOWN; KNOWN = {}", 1), ("KNOWN['a'] = 1", 1), ("KNOWN['a'] += 1", 1), ("del KNOWN['a']", 1),
        ("KNOWN.setdefault('a', 1)", 1), ("_cache.update(a=1)", 1), ("_cache['a'].b.append(1)", 1),
        ("helper.cache = 1", 1), ("Kind.cache = 1", 1), ("os.environ['A'] = '1'", 1), ("os.environ.update(A='1')", 1),
        ("path.sep = '/'", 1), ("self.known['a'] = KNOWN['a']", 0), ("return KNOWN.get('a')", 0),
        ("_cache = {}; _cache['a'] = 1", 0), ("known = {}; known['a'] = 1", 0),
    ):  # fmt: skip
        above = "import os\nfrom os import path\nKNOWN = {}\n_cache: dict = {}\n_cache['b'] = 1\nclass Kind: pass\n"
        tree = ast.parse(f"{above}def helper(self):\n    {body}\n")
        assert len(list(_writes(tree))) == found, body
    assert len(list(_writes(ast.parse("import os\nos.environ['A'] = '1'\n")))) == 1


def test_no_module_has_state() -> None:
    # The report draws within matplotlib's rc_context, which puts the settings back.
    # Open MPI, Horovod and gloo are told what to do by the environment that they start in, and by nothing else.
    # torch.compile is told where to keep its code by the environment alone.
    # A worker finds modules where the process that started it does.
    # A file of the user's becomes a module, in the one place where Python looks for modules.
    lent = {
        ("report.figures", "matplotlib.rcParams.update"),
        ("core.comm.horovod_world", "os.environ.setdefault"),
        ("core.comm.horovod_world", "os.environ.update"),
        ("core.comm.torch_world", "os.environ.setdefault"),
        ("core.comm.rendezvous", "os.environ.update"),
        ("core.own_parts", "sys.modules.update"),
        ("core.workers", "sys.path.extend"),
        ("models.network", "os.environ.update"),
    }
    written = [
        module.at(node)
        for module in modules().values()
        for node in _writes(module.tree)
        if (module.name, _called(node)) not in lent
    ]
    assert written == []


def test_files_and_functions_are_short_and_modules_say_what_they_are_for() -> None:
    for module in modules().values():
        assert len(module.path.read_text(encoding="utf-8").splitlines()) <= 480, module.path
        assert ast.get_docstring(module.tree), f"{module.path}: what is this module for?"
        for inner in module.nodes:
            if isinstance(inner, ast.FunctionDef):
                assert (inner.end_lineno or 0) - inner.lineno < 60, f"{module.at(inner)}: {inner.name} is too long"
