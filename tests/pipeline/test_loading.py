"""load_pipeline: what was saved comes back bit for bit, and whatever is wrong with a directory is named."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import COMPONENTS, DTYPES, assert_same_media
from safetensors.torch import load_file, save_file

from h3opt.errors import CheckpointError
from h3opt.pipeline.generation import GenerationSettings, Media, generate
from h3opt.pipeline.loading import load_pipeline
from h3opt.reference import save_tiny, tiny_pipeline

MODELS = ("text_encoder", *COMPONENTS)
WEIGHTS = {
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "audio_vae": "audio_vae/diffusion_pytorch_model.safetensors",
}
LIBRARIES = ("transformer", "text_encoder")  # of diffusers and of transformers
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pipeline on disk; never written to."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy elsewhere, of hard links: write a file only after unlinking it."""
    return Path(shutil.copytree(saved, tmp_path / "copy", copy_function=os.link))


def write(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def edit(path: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite a safetensors file with other tensors."""
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_pipeline(directory, torch.float32)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


# ---------------------------------------------------------------------------------------------- what is good loads


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weights_are_those_of_the_pipeline_that_was_saved(dtype: str, saved: Path) -> None:
    loaded, built = load_pipeline(saved, DTYPES[dtype]), tiny_pipeline(DTYPES[dtype])
    for name in MODELS:
        left, right = getattr(loaded, name).state_dict(), getattr(built, name).state_dict()
        assert left.keys() == right.keys()
        for key, tensor in right.items():
            assert left[key].dtype == tensor.dtype and torch.equal(left[key], tensor), f"{name}.{key}"


def test_a_moved_pipeline_generates_the_bits_of_the_one_that_was_saved(
    copy: Path, unmodified: Callable[..., Media], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    loaded = load_pipeline(copy.name, torch.float32)  # a relative path, and not the one the index records
    loaded.set_progress_bar_config(disable=True)
    assert_same_media(generate(loaded, GenerationSettings()), unmodified("float32"))
    assert all(getattr(loaded, name)._diffusers_load_id.startswith(copy.name) for name in MODELS)


@pytest.mark.parametrize("name", ["transformer_ref", "processor"])
def test_a_component_of_other_workflows_may_be_absent(name: str, copy: Path) -> None:
    shutil.rmtree(copy / name, ignore_errors=True)
    assert getattr(load_pipeline(copy), name) is None


def test_a_sharded_component_loads_and_a_missing_shard_is_named(copy: Path) -> None:
    model = load_pipeline(copy, torch.float32).transformer
    (copy / WEIGHTS["transformer"]).unlink()
    model.save_pretrained(str(copy / "transformer"), max_shard_size="2MB")
    shards = sorted((copy / "transformer").glob("*.safetensors"))
    assert len(shards) > 2
    again = load_pipeline(copy, torch.float32).transformer.state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in model.state_dict().items())
    shards[1].unlink()
    message = refusal(copy)
    assert message.startswith("transformer: ") and str(shards[1]) in message


# --------------------------------------------------------------------------------------------------- the directory


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in refusal(tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refusal(tmp_path / "file")
    assert "There is no directory" in refusal(tmp_path / ("a" * 5000))


def test_a_directory_without_an_index_is_told_what_it_lacks(copy: Path) -> None:
    (copy / "modular_model_index.json").unlink()
    assert f"{copy} holds no modular_model_index.json" in refusal(copy)


@pytest.mark.parametrize("content", [b"{nope", b"", b"[]", b"{}", b"\xff\xfe", b'{"_class_name": "Nothing"}'])
def test_an_index_that_is_none_is_named(content: bytes, copy: Path) -> None:
    write(copy / "modular_model_index.json", content)
    assert str(copy / "modular_model_index.json") in refusal(copy)


def test_another_kind_of_pipeline_is_refused_by_class(copy: Path) -> None:
    index = {"_class_name": "StableDiffusionXLModularPipeline", "_blocks_class_name": "StableDiffusionXLAutoBlocks"}
    write(copy / "modular_model_index.json", json.dumps(index).encode())
    assert "StableDiffusionXLModularPipeline" in refusal(copy)


def test_code_in_the_directory_is_not_run(copy: Path) -> None:
    (copy / "modular_config.json").write_text('{"auto_map": {"ModularPipelineBlocks": "evil.Blocks"}}')
    (copy / "evil.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\nclass Blocks: pass\n")
    assert "trust_remote_code" in refusal(copy)
    assert not (copy / "ran").exists()


def test_a_class_that_does_not_exist_is_refused(copy: Path) -> None:
    index = json.loads((copy / "modular_model_index.json").read_text())
    index["vae"][2]["type_hint"] = ["diffusers", "AutoencoderOfNoModel"]
    write(copy / "modular_model_index.json", json.dumps(index).encode())
    refusal(copy)


# -------------------------------------------------------------------------------------------------- the components


@pytest.mark.parametrize("name", [*MODELS, "tokenizer", "scheduler", "audio_scheduler"])
def test_a_missing_component_is_named_even_where_it_was_saved_from_still_has_it(name: str, copy: Path) -> None:
    shutil.rmtree(copy / name)
    message = refusal(copy)
    assert f" {name}:" in message and str(copy / name) in message


@pytest.mark.parametrize("name", WEIGHTS)
def test_missing_weights_are_named(name: str, copy: Path) -> None:
    (copy / WEIGHTS[name]).unlink()
    assert refusal(copy).startswith(f"{name}: {copy / name} holds no safetensors file.")


@pytest.mark.parametrize("part", [0.0, 1e-5, 0.5, 0.999999])
@pytest.mark.parametrize("name", WEIGHTS)
def test_truncated_weights_are_named_by_file(name: str, part: float, copy: Path) -> None:
    file = copy / WEIGHTS[name]
    content = file.read_bytes()
    write(file, content[: int(len(content) * part)])
    assert refusal(copy).startswith(f"{name}: {file} cannot be read: ")


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_lack_a_tensor_are_refused_by_its_name(name: str, copy: Path) -> None:
    dropped: list[str] = []

    def drop(tensors: Tensors) -> None:
        dropped.append(sorted(tensors)[3])
        del tensors[dropped[0]]

    edit(copy / WEIGHTS[name], drop)
    assert refusal(copy).startswith(f"{name}: the weights in {copy / name} lack: {dropped[0]}.")


@pytest.mark.parametrize("name", LIBRARIES)
def test_weights_with_a_tensor_too_many_are_refused_by_its_name(name: str, copy: Path) -> None:
    edit(copy / WEIGHTS[name], lambda tensors: tensors.update({"zzz.one": torch.zeros(3), "zzz.two": torch.zeros(3)}))
    message = refusal(copy)
    assert message.startswith(f"{name}: ") and "what the model does not: zzz.one and 1 more." in message


@pytest.mark.parametrize("name", LIBRARIES)
def test_weights_of_another_shape_are_refused_with_both_shapes(name: str, copy: Path) -> None:
    changed: dict[str, Any] = {}

    def grow(tensors: Tensors) -> None:
        key = sorted(key for key, tensor in tensors.items() if tensor.ndim >= 2)[3]
        tensor = tensors[key]
        tensors[key] = torch.cat([tensor, tensor])
        changed[key] = f"{list(tensors[key].shape)}, not {list(tensor.shape)}"

    edit(copy / WEIGHTS[name], grow)
    ((key, shapes),) = changed.items()
    message = refusal(copy)
    assert message.startswith(f"{name}: ") and f"{key} {shapes}" in message


class _Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", ["transformer/diffusion_pytorch_model.bin", "text_encoder/pytorch_model.bin"])
def test_pickled_weights_are_refused_unopened(file: str, copy: Path) -> None:
    name = file.split("/")[0]
    (copy / WEIGHTS[name]).unlink()
    (copy / file).write_bytes(pickle.dumps(_Bomb(copy / "ran")))
    assert refusal(copy).startswith(f"{name}: {copy / file} is a pickle, which is never opened.")
    # Nor as a fallback for safetensors that cannot be read, nor as a shard, nor under another name.
    (copy / WEIGHTS[name]).write_bytes(b"")
    assert f"{copy / WEIGHTS[name]} cannot be read" in refusal(copy)
    (copy / WEIGHTS[name]).unlink()
    (copy / f"{WEIGHTS[name]}.index.json").write_text(json.dumps({"weight_map": {"a": Path(file).name}}))
    assert str(copy / file) in refusal(copy)
    shutil.copy(copy / file, copy / WEIGHTS[name])
    refusal(copy)
    assert not (copy / "ran").exists()
    pickle.loads((copy / file).read_bytes())
    assert (copy / "ran").exists(), "the bomb is no bomb"


@pytest.mark.parametrize("file", ["config.json", "{name}.safetensors.index.json"])
def test_a_damaged_json_file_of_a_component_is_refused(file: str, copy: Path) -> None:
    path = copy / "vae" / file.format(name="diffusion_pytorch_model")
    path.unlink(missing_ok=True)
    path.write_text("{nope")
    message = refusal(copy)
    assert message.startswith("vae: ") and (str(path) in message or str(copy / "vae") in message)


@pytest.mark.parametrize("file", ["transformer/config.json", "scheduler/scheduler_config.json"])
def test_a_missing_config_is_named(file: str, copy: Path) -> None:
    (copy / file).unlink()
    name, config = file.split("/")
    message = refusal(copy)
    assert message.startswith(f"{name}: ") and config in message


def test_a_tokenizer_without_vocabulary_is_refused(copy: Path) -> None:
    (copy / "tokenizer/tokenizer.json").unlink()  # transformers then gives a tokenizer that knows no word
    message = refusal(copy)
    assert message.startswith("tokenizer: ") and "tokenizer.json" in message


def test_a_damaged_tokenizer_is_refused(copy: Path) -> None:
    file = copy / "tokenizer/tokenizer.json"
    write(file, file.read_bytes()[:3000])
    assert refusal(copy).startswith(f"tokenizer: {copy / 'tokenizer'} cannot be loaded: ")
