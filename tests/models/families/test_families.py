"""Images and videos of each family: sized from their dimensions alone, as the processors of transformers make them."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, QWENS, chat, encoder_of, image_processor_of, model_config_of, model_of, picture
from hypothesis import given, strategies as st
from PIL import Image

pytest.importorskip("transformers")


from energon_bridge.core.errors import ConfigurationError, SampleError
from energon_bridge.models.families import (
    ChatConfig,
    FixedTokenFamily,
    QwenFamily,
    VideoFrames,
    llava_family,
    qwen_family,
)
from energon_bridge.models.images.resize import smart_resize, smart_resize_video
from energon_bridge.models.images.visual import size_of

LONG = os.environ.get("ENERGON_LONG_TESTS") == "1"
SIDES = st.integers(1, 3000)
AREAS = st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)).map(lambda pair: (min(pair), max(pair)))


@given(SIDES, SIDES, st.sampled_from([8, 28, 32]), AREAS)
def test_images_are_sized_as_in_transformers(height: int, width: int, factor: int, area: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference

    try:
        expected = reference(height, width, factor, *area)
    except ValueError:
        with pytest.raises(SampleError, match="too narrow"):
            smart_resize(height, width, factor=factor, area=area)
        return
    assert smart_resize(height, width, factor=factor, area=area) == expected


@given(st.integers(2, 300), SIDES, SIDES, st.sampled_from([28, 32]), AREAS)
def test_videos_are_sized_as_in_transformers(
    frames: int, height: int, width: int, factor: int, area: tuple[int, int]
) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as reference

    try:
        expected = reference(frames, height, width, 2, factor, *area)
    except ValueError:
        with pytest.raises(SampleError, match="too narrow"):
            smart_resize_video(frames, height, width, factor=factor, area=area, temporal_factor=2)
        return
    assert smart_resize_video(frames, height, width, factor=factor, area=area, temporal_factor=2) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_counted_from_sizes_are_those_of_the_pixels(family: str) -> None:
    """1,000 images of random sizes with ENERGON_LONG_TESTS=1, else 40."""
    made = encoder_of(family, max_pixels=64 * 64).family
    assert made is not None
    rng = np.random.default_rng(7)
    for number in range(1000 if LONG else 40):
        width, height = (int(side) for side in np.exp(rng.uniform(np.log(4), np.log(300), 2)))
        plan = made.plan_image(width, height)
        visual = made.process([picture(width, height, seed=number)], [], [plan])  # raises where they differ
        if family == "llava":
            assert plan.tokens == 4
            continue
        grid = visual["image_grid_thw"][0].tolist()
        assert tuple(grid) == plan.grid
        assert len(visual["pixel_values"]) == math.prod(grid) == plan.tokens * 4


@pytest.mark.parametrize("family", QWENS)
def test_tokens_are_those_of_the_whole_text_with_its_images_expanded(family: str) -> None:
    """As the family's processor makes them, which cannot be made without torchvision."""
    encoder = encoder_of(family)
    images = [picture(40, 16), picture(16, 16)]
    sample = encoder.encode(chat("a <image>b\n\n c", "d e", "<image>", "f", images=images, system="s"))
    messages = [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": "b\n\n c"}],
        },
        {"role": "assistant", "content": "d e"},
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "f"},
    ]
    pieces = encoder.tokenizer.apply_chat_template(messages, tokenize=False).split("<|image_pad|>")
    counts = [int(grid.prod()) // 4 for grid in sample.visual["image_grid_thw"]]
    text = pieces[0] + "".join("<|image_pad|>" * n + piece for n, piece in zip(counts, pieces[1:], strict=True))
    expected = encoder.tokenizer(text)["input_ids"][: len(sample.tokens)]
    assert sample.tokens.tolist() == expected
    pad = encoder.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert torch.equal(sample.mm_token_type_ids, torch.eq(sample.tokens, pad).long())


@pytest.mark.parametrize(
    ("config", "size"), [({}, (336, 336)), ({"do_center_crop": False, "size": {"height": 28, "width": 42}}, (28, 42))]
)
@pytest.mark.parametrize(("strategy", "extra"), [("default", 0), ("full", 1)])
def test_llava_counts_the_patches_of_its_processor(
    config: dict[str, Any], size: tuple[int, int], strategy: str, extra: int
) -> None:
    from transformers import CLIPImageProcessorPil

    settings = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}, **config}
    family = llava_family(CLIPImageProcessorPil(**settings), patch_size=14, feature_strategy=strategy)
    plan = family.plan_image(10, 2000)
    assert plan.tokens == size[0] // 14 * (size[1] // 14) + extra
    assert family.process([picture(50, 20)], [], [plan])["pixel_values"].shape == (1, 3, *size)


def test_what_is_no_llava_is_refused() -> None:
    from transformers import CLIPImageProcessorPil

    with pytest.raises(ConfigurationError, match=r"gives images of different sizes .*shortest_edge"):
        llava_family(CLIPImageProcessorPil(do_center_crop=False, size={"shortest_edge": 20}), patch_size=14)
    family = FixedTokenFamily(image_processor=image_processor_of("llava"), image_tokens=5, patch_size=8)
    with pytest.raises(SampleError, match=r"take \[4\] tokens, but their sizes give \[5\]"):
        family.process([picture()], [], [family.plan_image(1, 1)])
    with pytest.raises(SampleError, match="take no videos"):
        encoder_of("llava").encode(chat("<video>", "a", videos=[frames_of(2)]))


def test_bounds_of_ones_own_reach_the_pixels() -> None:
    family = qwen_family("qwen2_vl", image_processor_of("qwen2_vl"), min_pixels=32 * 32, max_pixels=48 * 48)
    plan = family.plan_image(8, 8)
    assert plan.grid == (1, 8, 8)
    assert family.process([picture(8, 8)], [], [plan])["image_grid_thw"].tolist() == [[1, 8, 8]]


@pytest.mark.parametrize("image", [picture(6, 4), torch.zeros(3, 4, 6), np.zeros((4, 6, 3), dtype=np.uint8)])
def test_sizes_are_width_and_height(image: Any) -> None:
    assert size_of(image) == (6, 4)
    with pytest.raises(SampleError, match="an image must be"):
        size_of("an image")


# Videos --------------------------------------------------------------------------------------------------------------


def frames_of(count: int, height: int = 20, width: int = 28) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize("form", ["tensor", "images", "arrays"])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("family", QWENS)
def test_a_video_is_its_frames_in_temporal_patches(family: str, count: int, form: str) -> None:
    """Each patch has the pixels that the image processor makes of its two frames; an odd last frame stands twice."""
    made = encoder_of(family).family
    assert isinstance(made, QwenFamily)
    frames: Any = frames_of(count, 16, 24)
    images = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in frames]
    if form != "tensor":
        frames = images if form == "images" else [np.array(image) for image in images]
    video = VideoFrames(frames=frames, fps=2.0)
    plan = made.plan_video(video)
    visual = made.process([], [video], [plan])
    steps, rows, columns = visual["video_grid_thw"][0].tolist()
    assert (steps, rows, columns) == plan.grid
    assert steps == math.ceil(count / 2)
    patches = visual["pixel_values_videos"].reshape(steps, rows * columns, 3, 2, 4, 4)
    still = made.image_processor(
        images=[image.resize((columns * 4, rows * 4), Image.Resampling.BICUBIC) for image in images],
        do_resize=False,
        return_tensors="pt",
    )["pixel_values"].reshape(count, rows * columns, 3, 2, 4, 4)
    for number in range(2 * steps):
        expected = still[min(number, count - 1)][:, :, 0]
        assert torch.equal(patches[number // 2][:, :, number % 2], expected)


@pytest.mark.parametrize(("count", "fps"), [(2, 2.0), (5, 3.0), (7, None)])
def test_the_times_of_qwen3_are_written_as_its_processor_writes_them(count: int, fps: float | None) -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    encoder = encoder_of("qwen3_vl")
    sample = encoder.encode(chat("<video>", "a", videos=[VideoFrames(frames=frames_of(count), fps=fps)]))
    # The processor of transformers cannot be made without torchvision, but its texts can.
    sizes = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    processor: Any = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.__dict__.update(
        video_processor=sizes,
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    metadata = SimpleNamespace(fps=fps, frames_indices=list(range(count)))
    inputs = {"video_grid_thw": sample.visual["video_grid_thw"], "video_metadata": [metadata]}
    written = processor.replace_video_token(inputs, video_idx=0)
    text = encoder.tokenizer.decode(sample.tokens)
    assert text.startswith(f"<|im_start|>user\n<|vision_start|>{written}<|vision_end|><|im_end|>")


def test_times_can_stand_without_the_tokens_around_the_whole() -> None:
    encoder = encoder_of("qwen3_vl")
    assert isinstance(encoder.family, QwenFamily)
    family = QwenFamily(
        image_processor=encoder.family.image_processor,
        video_min_pixels=64,
        video_max_pixels=64,
        video_timestamps=True,
        video_wrapper=False,
    )
    encoder = type(encoder)(encoder.tokenizer, family)
    video = VideoFrames(frames=frames_of(2, 8, 8), timestamps=(1.0, 4.0))
    text = encoder.tokenizer.decode(encoder.encode(chat("<video>", "a", videos=[video])).tokens)
    assert text.startswith("<|im_start|>user\n<2.5 seconds><|vision_start|><|video_pad|><|vision_end|><|im_end|>")


@pytest.mark.parametrize("family", QWENS)
def test_positions_are_those_of_the_model(family: str) -> None:
    """Of texts, images and videos in one batch, with padding."""
    encoder = encoder_of(family)
    videos = [VideoFrames(frames=frames_of(count), fps=fps) for count, fps in ((5, 1.5), (2, 30.0))]
    samples = [
        chat("<image>a", "b", "<image><video>c", "d", images=[picture(40, 16), picture()], videos=videos[:1]),
        chat("a", "b"),
        chat("<video><image>", "b", images=[picture(8, 30)], videos=videos[1:]),
    ]
    batch = encoder.batch([encoder.encode(sample) for sample in samples])
    model = model_of(model_config_of(family, encoder.tokenizer)).model
    grids = {name: batch.visual_inputs[name] for name in ("image_grid_thw", "video_grid_thw")}
    if family == "qwen2_5_vl":
        assert batch.visual_inputs["second_per_grid_ts"].tolist() == pytest.approx([2 / 1.5, 2 / 30])
        grids["second_per_grid_ts"] = batch.visual_inputs["second_per_grid_ts"]
    expected, _ = model.get_rope_index(
        batch.tokens, mm_token_type_ids=batch.mm_token_type_ids, attention_mask=batch.attention_mask, **grids
    )
    assert torch.equal(batch.mrope_position_ids, expected)


@pytest.mark.parametrize("form", ["tensor", "list", "with times"])
def test_of_too_many_frames_those_are_taken_that_a_decoder_would_give(form: str) -> None:
    encoder = encoder_of("qwen3_vl", ChatConfig(max_num_frames=4))
    frames = frames_of(9)
    given: Any = {
        "tensor": VideoFrames(frames=frames, fps=3.0),
        "list": VideoFrames(frames=list(frames), fps=3.0),
        "with times": VideoFrames(frames=frames, timestamps=tuple(number / 3 for number in range(9))),
    }[form]
    sample = encoder.encode(chat("<video>", "a", videos=[given]))
    expected = encoder.encode(chat("<video>", "a", videos=[Decoder(frames, 3.0)]))
    assert torch.equal(sample.tokens, expected.tokens)
    assert torch.equal(sample.visual["pixel_values_videos"], expected.visual["pixel_values_videos"])


@pytest.mark.parametrize(("family", "times"), [("qwen2_vl", 0), ("qwen2_5_vl", 1), ("qwen3_vl", 1)])
def test_a_rate_that_is_taken_for_granted_is_said_once(
    family: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = encoder_of(family)
    known = [VideoFrames(frames=frames_of(4), fps=2.0), VideoFrames(frames=frames_of(2), timestamps=(0.0, 1.5))]
    for video in (*known, VideoFrames(frames=frames_of(1)), Decoder(frames_of(4), 2.0)):
        encoder.encode(chat("<video>", "a", videos=[video]))
    assert not caplog.records
    unknown = [encoder.encode(chat("<video>", "a", videos=[frames_of(4)])) for _ in range(2)]
    assert caplog.text.count("24 a second") == times
    told = encoder.encode(chat("<video>", "a", videos=[VideoFrames(frames=frames_of(4), fps=24.0)]))
    assert all(torch.equal(one.tokens, told.tokens) for one in unknown)


@pytest.mark.parametrize("frames", [torch.zeros(3, 4, 4), [], ["a"]])
def test_what_is_no_frames_is_refused(frames: Any) -> None:
    with pytest.raises(SampleError, match=r"sample 'q': frames must be a \(frames, channels, height, width\) tensor"):
        encoder_of("qwen2_vl").encode(chat("<video>", "a", videos=[VideoFrames(frames=frames)]))


class Decoder:
    """A decoder of videos that notes what it is asked for."""

    def __init__(self, frames: torch.Tensor, fps: float) -> None:
        self.frames, self.fps = frames, fps
        self.asked: list[tuple[int, int]] = []

    def get_metadata(self) -> Any:
        count, _, height, width = self.frames.shape
        return SimpleNamespace(
            video_num_frames=count or None, video_fps=self.fps, video_height=height, video_width=width
        )

    def get_video_clips(self, video_clip_ranges: Any, video_unit: Any = "seconds") -> Any:
        assert video_unit == "frames"
        self.asked += video_clip_ranges
        return [self.frames[first : last + 1] for first, last in video_clip_ranges], None


@pytest.mark.parametrize(
    ("count", "fps", "config", "numbers"),
    [
        (30, 10.0, {}, [0, 6, 12, 17, 23, 29]),
        (3, 10.0, {}, [0, 1, 2]),
        (30, 10.0, {"video_fps": 0.1}, [0, 10, 19, 29]),
        (30, 10.0, {"max_num_frames": 2}, [0, 29]),
    ],
)
def test_frames_of_a_decoder_are_chosen_without_decoding(
    count: int, fps: float, config: dict[str, Any], numbers: list[int]
) -> None:
    decoder = Decoder(frames_of(count), fps)
    encoder = encoder_of("qwen3_vl", ChatConfig(**config))
    prepared = encoder.preencode_sample(chat("<video>", "a", videos=[decoder]))
    assert decoder.asked == []
    sample = encoder.postencode_sample(prepared)
    assert decoder.asked == [(number, number) for number in numbers]
    times = tuple(number / fps for number in numbers)
    given = VideoFrames(frames=decoder.frames[numbers], fps=len(numbers) / count * fps, timestamps=times)
    expected = encoder.encode(chat("<video>", "a", videos=[given]))
    assert torch.equal(sample.tokens, expected.tokens)
    for name, value in expected.visual.items():
        assert torch.equal(sample.visual[name], value), name


def test_a_decoder_without_video_is_refused() -> None:
    with pytest.raises(SampleError, match="has no video with a known number of frames"):
        encoder_of("qwen2_vl").encode(chat("<video>", "a", videos=[Decoder(frames_of(0), 1.0)]))
