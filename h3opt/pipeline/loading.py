"""Load a pipeline from a directory that ``save_pretrained`` wrote, and refuse a directory that is incomplete."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec
from safetensors import safe_open

from h3opt.errors import CheckpointError
from h3opt.pipeline.minimax_h3 import OPTIONAL_COMPONENTS, pipeline_class


def load_pipeline(
    directory: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> Any:
    """``ModularPipeline.from_pretrained`` and ``load_components(dtype=dtype)``, from this directory alone.

    diffusers goes on without a component that fails to load, and with random weights where a file lacks some; here
    both are errors. Modules the model keeps in float32 stay float32. Only safetensors are read, nothing is unpickled.

    Raises:
        CheckpointError: the directory is missing or no MiniMax-H3 pipeline; or a component is missing from it, cannot
            be read, or its weights are not those of the model.
    """
    directory = Path(directory)
    pipe = _read_index(directory)
    specs = []
    for name in pipe.pretrained_component_names:
        spec = pipe.get_component_spec(name)
        spec.pretrained_model_name_or_path, spec.subfolder = str(directory), spec.subfolder or name
        folder = directory / spec.subfolder
        if folder.is_dir():
            _check_files(spec, folder)  # of all components before the first is loaded, which may take minutes
            specs.append(spec)
        elif name not in OPTIONAL_COMPONENTS:
            raise CheckpointError(f"{directory} has no {name}: there is no folder {folder}. {_SAVE_AGAIN}")
    pipe.register_components(**{spec.name: _load_component(spec, directory / spec.subfolder, dtype) for spec in specs})
    return pipe.to(device)


_SAVE_AGAIN = "Save or copy the pipeline again, with all components."
_INDEX_FILES = ("modular_model_index.json", "model_index.json")


def _read_index(directory: Path) -> Any:
    """Return the pipeline that the index file describes, without components."""
    if not os.path.isdir(directory):
        raise CheckpointError(f"There is no directory {directory}. Give one that diffusers' save_pretrained wrote.")
    index = next((file for name in _INDEX_FILES if (file := directory / name).is_file()), None)
    if index is None:
        raise CheckpointError(
            f"{directory} holds no {_INDEX_FILES[0]}. Give a directory that diffusers' save_pretrained wrote."
        )
    try:
        json.loads(index.read_bytes())
        pipe = ModularPipeline.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # diffusers does not wrap the errors of the libraries below it
        raise CheckpointError(f"{index} is not the index of a pipeline: {_first_line(error)} {_SAVE_AGAIN}") from error
    if not isinstance(pipe, pipeline_class()):
        raise CheckpointError(f"{index} is that of a {type(pipe).__name__}. Give a MiniMax-H3 pipeline.")
    return pipe


def _check_files(spec: ComponentSpec, folder: Path) -> None:
    """Refuse weights that are incomplete, by file, and weights that are pickled: opening those runs code."""
    name = spec.name
    if not _is_model(spec):  # a tokenizer without its files loads, and knows no word
        vocabulary = list(getattr(spec.type_hint, "vocab_files_names", {}).values())
        if vocabulary and not any((folder / file).is_file() for file in vocabulary):
            raise CheckpointError(f"{name}: {folder} holds none of {', '.join(vocabulary)}. {_SAVE_AGAIN}")
        return
    files = set(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(file for suffix in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{suffix}"))
        if pickled:
            raise CheckpointError(f"{name}: {pickled[0]} is a pickle, which is never opened. Save it as safetensors.")
        raise CheckpointError(f"{name}: {folder} holds no safetensors file. {_SAVE_AGAIN}")
    file = folder
    try:
        for file in folder.glob("*.safetensors.index.json"):
            files |= {folder / shard for shard in json.loads(file.read_bytes())["weight_map"].values()}
        for file in sorted(files):
            with safe_open(file, "pt"):
                pass
    except Exception as error:  # errors of json, of safetensors and of the system
        raise CheckpointError(f"{name}: {file} cannot be read: {_first_line(error)} {_SAVE_AGAIN}") from error


_KEY_PROBLEMS = {
    "missing_keys": "lack",
    "unexpected_keys": "have what the model does not",
    "mismatched_keys": "have other shapes than the model",
}


def _load_component(spec: ComponentSpec, folder: Path, dtype: torch.dtype) -> Any:
    """Load one component, and refuse weights that are not exactly those of the model."""
    options: dict[str, Any] = {"subfolder": spec.subfolder, "local_files_only": True}
    if _is_model(spec):
        options |= {"variant": spec.variant, "dtype": dtype, "use_safetensors": True}
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below, by name
    try:
        loader: Any = spec.type_hint
        loaded = loader.from_pretrained(spec.pretrained_model_name_or_path, **options)
    except Exception as error:  # diffusers, transformers, safetensors, tokenizers and json each raise their own
        raise CheckpointError(f"{spec.name}: {folder} cannot be loaded: {_first_line(error)} {_SAVE_AGAIN}") from error
    component, info = loaded if _is_model(spec) else (loaded, dict.fromkeys(_KEY_PROBLEMS, ()))
    component._diffusers_load_id = spec.load_id  # as ComponentSpec.load does
    for kind, problem in _KEY_PROBLEMS.items():
        keys = [f"{key[0]} {list(key[1])}, not {list(key[2])}" if isinstance(key, tuple) else key for key in info[kind]]
        if keys:
            first, more = min(keys), f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise CheckpointError(
                f"{spec.name}: the weights in {folder} {problem}: {first}{more}. Keep weights and config.json together."
            )
    return component


def _is_model(spec: ComponentSpec) -> bool:
    return isinstance(spec.type_hint, type) and issubclass(spec.type_hint, torch.nn.Module)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or repr(error)
    line = text.splitlines()[0].rstrip()
    return line if line.endswith(".") else line + "."
