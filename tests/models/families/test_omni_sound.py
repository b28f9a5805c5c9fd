"""The sound of videos for omni models: in time with the frames, as the model's own processor mixes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import write_video
from processors import called, place, planned, template_of, tiny_model, tiny_model_config, tiny_processor

from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.av import AVDecoder
from energon_bridge.models.conversations.inputs import model_inputs
from energon_bridge.models.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder, VideoFrames
from energon_bridge.models.families.processor_positions import rope_index
from energon_bridge.models.families.sound import track_of
from energon_bridge.models.families.video import decoded, video_of

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = {"qwen2_5_omni_thinker": "Qwen2_5OmniProcessor", "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor"}
TALKS = {
    "one video": "<video>",
    "a short sound, many frames": "<video:4:0.7>",
    "a long sound, few frames": "<video:0.5:9>",
    "two videos": "<video><video:2:1>",
    "a sound of its own before": "<audio><video>",
    "a sound of its own behind, an image between": "<video><image><audio>",
}


@cache
def made(model_type: str, **config: Any) -> tuple[Any, Any, ChatTemplateTaskEncoder]:
    try:
        processor = tiny_processor(MODELS[model_type])
    except ImportError as error:
        pytest.skip(str(error))
    model = tiny_model(tiny_model_config(model_type, processor))
    chat = ChatConfig(chat_template=template_of(processor), seq_length=60_000, over_long="raise", **config)
    with planned():
        return processor, model, ChatTemplateTaskEncoder.for_processor(processor, chat, model_config=model.config)


def noise(rng: np.random.Generator, seconds: float) -> tuple[np.ndarray, int]:
    return rng.standard_normal(int(seconds * 16000)).astype(np.float32) / 10, 16000


def talk(form: str, processor: Any, fps: float = 2.0, seed: int = 0) -> tuple[ChatSample, str]:
    """Return a sample for places like `<video:4:0.7>`: seconds of frames, and of sound (0: none); and its text."""
    rng = np.random.default_rng(seed)
    media: dict[str, list[Any]] = {"image": [], "video": [], "audio": []}
    question = text = ""
    for one in form.strip("<>").split("><"):
        kind, *seconds = one.split(":")
        if kind == "video":
            shown, heard = map(float, seconds or (3, 3.3))
            frames = torch.from_numpy(rng.integers(0, 256, (max(2, int(shown * fps)), 3, 56, 84), np.uint8))
            media[kind].append(VideoFrames(frames=frames, fps=fps, sound=noise(rng, heard) if heard else None))
        else:
            media[kind].append(noise(rng, 1.3) if kind == "audio" else rng.integers(0, 256, (60, 90, 3), np.uint8))
        question += f"<{kind}> and "
        text += f"{place(processor, kind)} and "
    turns = [{"role": "user", "content": f"{question}what?"}, {"role": "assistant", "content": "A thing."}]
    sample = ChatSample(
        __key__=form, messages=turns, images=media["image"], videos=media["video"], audios=media["audio"]
    )
    return sample, f"<|im_start|>user\n{text}what?<|im_end|>\n<|im_start|>assistant\nA thing.<|im_end|>\n"


def positions(model: Any, theirs: dict[str, Any], heard: bool) -> torch.Tensor:
    """Return the model's own positions of one sample."""
    lengths = theirs["feature_attention_mask"].sum(-1) if "feature_attention_mask" in theirs else None
    return rope_index(model.config)(  # type: ignore[misc]
        input_ids=theirs["input_ids"],
        attention_mask=theirs["attention_mask"],
        image_grid_thw=theirs.get("image_grid_thw"),
        video_grid_thw=theirs.get("video_grid_thw"),
        use_audio_in_video=heard,
        audio_seqlens=lengths,
        second_per_grids=theirs.get("video_second_per_grid"),
    )[0][:, 0].long()


@pytest.mark.parametrize("fps", [1.0, 2.0, 7.5])
@pytest.mark.parametrize("form", TALKS.values(), ids=TALKS)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_video_is_heard_as_the_processor_mixes_it(model_type: str, form: str, fps: float) -> None:
    processor, model, encoder = made(model_type)
    sample, text = talk(form, processor, fps)
    theirs = called(processor, [text], [sample])
    types = torch.tensor(processor.create_mm_token_type_ids(theirs["input_ids"].tolist()))
    assert encoder.preencode_sample(sample).visual_tokens == int(types.count_nonzero())
    ours = encoder.encode(sample)
    count = len(ours.tokens)
    assert torch.equal(ours.tokens, theirs["input_ids"][0, :count])
    assert torch.equal(ours.mm_token_type_ids, types[0, :count])
    for name, value in ours.visual.items():
        assert torch.equal(value, theirs[name]), name
    assert {"input_features", "feature_attention_mask", "pixel_values_videos"} <= ours.visual.keys()
    assert torch.equal(ours.mrope_position_ids, positions(model, theirs, heard=True)[:, :count])


@pytest.mark.parametrize("model_type", MODELS)
def test_videos_of_different_rates_are_each_timed_by_their_own(model_type: str) -> None:
    processor, _, encoder = made(model_type)
    slow, _ = talk("<video:4:5>", processor, 1.0)
    fast, _ = talk("<video:4:5>", processor, 5.0)
    both, _ = talk("<video:4:5><video:4:5>", processor)
    both = ChatSample(__key__="both", messages=both.messages, videos=[*slow.videos, *fast.videos])
    seconds = encoder.encode(both).visual["video_second_per_grid"]
    assert seconds.tolist() == pytest.approx([2.0, 0.4])
    prepared = encoder.preencode_sample(both)
    assert prepared.plans == tuple(encoder.preencode_sample(one).plans[0] for one in (slow, fast))


@torch.no_grad()
@pytest.mark.parametrize("model_type", MODELS)
def test_losses_where_some_samples_have_sound_in_their_video(model_type: str) -> None:
    """The model takes one word for a whole batch; ours has the positions of each sample alone."""
    processor, model, encoder = made(model_type)
    forms = {"<video>": True, "<video:2:0>": False, "<audio>": False, "<audio><video:2:4><image>": True}
    samples, losses, count = [], 0.0, 0
    for form, heard in forms.items():
        sample, text = talk(form, processor)
        ours = encoder.encode(sample)
        samples.append(ours)
        theirs = called(processor, [text], [sample])
        theirs.pop("video_metadata", None)
        labels = torch.full_like(theirs["input_ids"], -100)
        labels[0, 1 : len(ours.labels) + 1] = torch.where(ours.loss_mask > 0, ours.labels, -100)
        learned = int((labels != -100).sum())
        losses += float(model(**theirs, labels=labels, use_audio_in_video=heard).loss) * learned
        count += learned
    packs = [encoder.pack_selected_samples(samples[:2]), encoder.pack_selected_samples(samples[2:])]
    for batch in (encoder.batch(samples), encoder.batch(packs)):
        inputs = model_inputs(batch, model)
        assert int((inputs["labels"][:, 1:] != -100).sum()) == count
        assert float(model(**inputs).loss) * count == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("model_type", MODELS)
def test_one_sample_with_a_heard_and_a_silent_video(model_type: str) -> None:
    """The model's function cannot say it, so each stretch is its own; they are put together by its own rule."""
    processor, model, encoder = made(model_type)
    forms = ["<video:2:3>", "<audio><video:3:0><image>", "<video:2:1>"]
    parts = [talk(form, processor, seed=number)[0] for number, form in enumerate(forms)]
    sample, text = talk("".join(forms), processor)
    sample.videos = [video for part in parts for video in part.videos]
    ours = encoder.encode(sample)
    theirs = called(processor, [text], [sample])
    assert torch.equal(ours.tokens, theirs["input_ids"][0, : len(ours.tokens)])
    start = model.config.vision_start_token_id
    grids, lengths = theirs["video_grid_thw"], theirs["feature_attention_mask"].sum(-1)
    borders = [n for n, token in enumerate(ours.tokens.tolist()) if token == start]  # video, video, image, video
    rule = rope_index(model.config)
    wanted: list[torch.Tensor] = []
    stretches = [(0, borders[1], 0, [0, 1]), (borders[1], borders[3], 1, []), (borders[3], len(ours.tokens), 2, [2])]
    for begin, end, number, sounds in stretches:
        images = {"image_grid_thw": theirs["image_grid_thw"]} if number == 1 else {}
        of_part = rule(  # type: ignore[misc]
            input_ids=ours.tokens[None, begin:end],
            attention_mask=torch.ones(1, end - begin, dtype=torch.int64),
            video_grid_thw=grids[number : number + 1],
            second_per_grids=theirs["video_second_per_grid"][number : number + 1],
            audio_seqlens=lengths[sounds],
            use_audio_in_video=number != 1,
            **images,
        )[0][:, 0].long()
        wanted.append(of_part + (wanted[-1].max() + 1 if wanted else 0))
    assert torch.equal(ours.mrope_position_ids, torch.cat(wanted, 1))


@pytest.mark.parametrize("model_type", MODELS)
def test_tracks_of_files_are_heard_where_they_are(model_type: str, tmp_path: Path) -> None:
    processor, model, encoder = made(model_type, video_sound=True)
    heard = write_video(tmp_path / "heard.mp4", frames=75, sound="aac", size=(84, 56)).read_bytes()
    silent = write_video(tmp_path / "silent.mp4", frames=50, size=(84, 56)).read_bytes()
    talks = [talk(f"<video:{seconds}>", processor) for seconds in ("3:3", "2:0")]
    for (sample, text), file, has_sound in zip(talks, (heard, silent), (True, False), strict=True):
        sample.videos = [AVDecoder(file)]
        ours = encoder.encode(sample)
        video = decoded(video_of(AVDecoder(file), fps=2.0, least=4, most=768))
        track = track_of(AVDecoder(file), rate=16000)
        assert (track is not None) == has_sound
        sound = (track.get(), 16000) if track is not None else None
        sample.videos = [VideoFrames(frames=torch.stack(video.frames), fps=video.fps, sound=sound)]
        theirs = called(processor, [text], [sample])
        assert torch.equal(ours.tokens, theirs["input_ids"][0, : len(ours.tokens)])
        assert ("input_features" in ours.visual) == has_sound
        for name, value in ours.visual.items():
            assert torch.equal(value, theirs[name]), name
        assert torch.equal(ours.mrope_position_ids, positions(model, theirs, has_sound)[:, : len(ours.tokens)])


def test_cut_off_videos_take_their_sounds_along() -> None:
    processor, _, encoder = made("qwen3_omni_moe_thinker", max_num_images=2, over_limit="truncate")
    sample, _ = talk("<audio><video><video:2:1>", processor)
    sample.messages = [
        {"role": "user", "content": "<audio> <video>"},
        {"role": "assistant", "content": "A thing."},
        {"role": "user", "content": "<video>"},
        {"role": "assistant", "content": "Another."},
    ]
    ours = encoder.encode(sample)
    assert len(ours.visual["video_grid_thw"]) == 1
    assert len(ours.visual["input_features"]) == 2


def test_sound_in_videos_is_never_left_out_in_silence() -> None:
    processor, _, encoder = made("qwen3_omni_moe_thinker")
    sample, _ = talk("<video>", processor)
    sample.videos = [VideoFrames(frames=sample.videos[0].frames, sound=sample.videos[0].sound)]
    with pytest.raises(SampleError, match="must tell when its frames are shown"):
        encoder.encode(sample)
    config = encoder.config
    with pytest.raises(SampleError, match="hears none in videos"):
        ChatTemplateTaskEncoder.for_processor(processor, config).encode(talk("<video>", processor)[0])
    with pytest.raises(ConfigurationError, match=r"video_sound .* needs a model that hears videos"):
        ChatTemplateTaskEncoder.for_processor(
            tiny_processor("Qwen2AudioProcessor"), ChatConfig(chat_template="x", video_sound=True)
        )
