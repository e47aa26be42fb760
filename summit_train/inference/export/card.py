"""A trained network with its papers: its weights as a safetensors file, and a model card in Markdown."""

from __future__ import annotations

import hashlib
import html
import json
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import torch

from summit_train.core.errors import RunFailed, UserError
from summit_train.core.files import check_output, replacing, write_text
from summit_train.core.run_folder import digest_path
from summit_train.core.saved import SAFETENSORS_KEY, load_checkpoint
from summit_train.core.text import percent
from summit_train.inference.trained import Trained
from summit_train.report.records import RunRecord
from summit_train.report.tables import views_of
from summit_train.spec import Spec
from summit_train.spec.catalog import is_foreign
from summit_train.spec.source import to_yaml

_FOLDERS = re.compile(r"""[^"']*/([^"'/]+\.py:\w+)""")  # of the files of callables, in JSON
WEIGHTS, CARD = "model.safetensors", "README.md"


def write_card(trained: Trained, out: Path) -> dict[str, Any]:
    """Write model.safetensors and README.md, as Hugging Face names a model card, into the folder `out`.

    The file holds what a checkpoint needs besides its weights, and comes with a .sha256, so every command that takes a
    checkpoint takes it. Return path, bytes, SHA-256 and whether the accuracy is known. Raises UserError where the
    package safetensors is missing or nothing can be written, RunFailed where the file does not give equal bits back.
    """
    try:
        from safetensors.torch import save
    except ModuleNotFoundError as error:
        raise UserError("--card needs the package safetensors: pip install safetensors") from error
    for name in (WEIGHTS, CARD):
        check_output("--out", out, out / name)
    spec = public_spec(trained.spec)
    experiment = json.loads(_FOLDERS.sub(r"\1", json.dumps(dict(trained.experiment))))
    about: dict[str, Any] = {"spec": spec.model_dump(mode="json"), "experiment": experiment}
    about |= {"step": trained.step, "optimizer": {}, "classes": list(trained.classes) if trained.has_names else None}
    # Views of one buffer, as a checkpoint may hold them, are not allowed in the file.
    weights = {name: value.contiguous().clone() for name, value in trained.weights.items()}
    content = save(weights, {"format": "pt", SAFETENSORS_KEY: json.dumps(about)})
    digest, size = hashlib.sha256(content).hexdigest(), len(content)
    with replacing(out / WEIGHTS) as file:
        file.write(content)
        write_text(digest_path(out / WEIGHTS), f"{digest}  {WEIGHTS}\n")  # as of a checkpoint
    _check_written(out / WEIGHTS, weights, size)
    run = trained.run_path and (trained.run_path / "spec.yaml").is_file() and RunRecord(trained.run_path)
    write_text(out / CARD, card_text(trained, spec, run or None, digest))
    facts = {"weights": str(out / WEIGHTS), "card": str(out / CARD), "bytes": size, "sha256": digest}
    return facts | {"step": trained.step, "has_accuracy": bool(run and run.final)}


def _check_written(path: Path, weights: dict[str, torch.Tensor], size: int) -> None:
    """Raise RunFailed, and leave no file, unless the file gives these weights back. Starts no code of the network."""

    def content(part: torch.Tensor) -> tuple[object, ...]:  # a NaN has its bits, too
        return part.dtype, part.shape, part.flatten().view(torch.uint8).numpy().tobytes()

    again = load_checkpoint(path, lambda *_: size)["model"]
    if again.keys() != weights.keys() or any(content(again[name]) != content(weights[name]) for name in weights):
        path.unlink()
        digest_path(path).unlink()
        raise RunFailed(f"{path}: read back, the file has other weights; install another version of safetensors")


def public_spec(spec: Spec) -> Spec:
    """Return a spec without the folders of the machine: of each path only the file's name."""
    weights = spec.model.pretrained
    places = {"root": None, "stage": None}
    data = spec.data.model_copy(update=places | {"train": _name(spec.data.train), "val": _name(spec.data.val)})
    model = spec.model.model_copy(update={"pretrained": weights and _name(weights)})
    public = spec.model_copy(update={"data": data, "model": model, "run_dir": "runs"})
    return Spec.model_validate_json(_FOLDERS.sub(r"\1", public.model_dump_json()))


def _name(path: str) -> str:
    return Path(path).name or path


def card_text(trained: Trained, spec: Spec, run: RunRecord | None, sha256: str) -> str:
    """Return the card. What comes from files is escaped; what is not known is said to be."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(quoted=shlex.quote, text=_text, views=views_of, percent=percent)
    template = resources.files(__package__).joinpath("card.md.j2").read_text(encoding="utf-8")
    recipe = to_yaml(spec.model_dump(mode="json"))
    named = f"model.arch={spec.model.arch}" if is_foreign(spec.model.arch) else None
    values = {"trained": trained, "spec": spec, "run": run, "recipe": recipe, "sha256": sha256, "named": named}
    return environment.from_string(template).render(values)


def _text(value: object) -> str:
    """Return a text from a file as one line of Markdown: no HTML, no link, no cell's end."""
    line = html.escape(" ".join(str(value).split()), quote=False)
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in line)
