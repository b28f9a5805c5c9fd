"""What loading costs a training step on a GPU: `python -m benchmarks.gpu`, on a machine with one.

    steps   Qwen2.5-VL of 3B with random weights in bfloat16, on packs of conversations about photographs: each step on
            a batch that is on the device already, and on the same batch from the loader, by three ways to get it there
    values  pixels as they arrive on the device, in each type, against floats made on the CPU
    launches  steps on batches of the device, while a loader is not there, idle, read, and read for the step itself
    stress  many batches copied while the device is busy, each hashed there, against those of the CPU
    nvjpeg  JPEGs decoded on the GPU by torchvision, against the decoder of the loader

`--model tiny --device cpu` tries the program anywhere.
"""

from __future__ import annotations

import argparse
import gc
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from benchmarks.data import SEED, jpeg
from benchmarks.models import SIZE, texts, write
from energon_bridge import (
    SampleDecoder,
    SavableDataLoader,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_bridge.core.prepare import parse_patterns, prepare_dataset
from energon_bridge.core.samples.sample import over_tensors, pin_value, to_device
from energon_bridge.models.conversations.inputs import model_inputs
from energon_bridge.models.families import ChatConfig, qwen_family
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml
from energon_bridge.training.presets import QWEN_TOKENS, train_tokenizer

from benchmarks.sample_cpu import Encoder  # isort: skip

DTYPES = ("uint8", "bfloat16", "float32")
MODES = ("at once", "pinned ahead", "copied ahead")
"""Pinned and copied when the step begins; pinned ahead by the loader, copied when the step begins; both ahead."""
PARTS = ("steps", "launches", "values", "stress", "nvjpeg")
TEXT = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "fullatt_block_indexes": [1]}


ATTENTION = "flash_varlen"
"""Name of `attention` for transformers: with "flash" in it, images are handed over whole, and not window by window."""


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within samples and windows, by the kernels of torch (flash-attn itself need not be there)."""
    is_causal = cu_seq_lens_q is None
    if cu_seq_lens_q is None:
        assert position_ids is not None
        cu_seq_lens_q, max_length_q = starts_of(position_ids)
    shape = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shape, 1), value.repeat_interleave(shape, 1)
    if query.is_cuda:
        rows = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
        starts = cu_seq_lens_q.to(torch.int32)
        longest = int(max_length_q)
        made = torch.ops.aten._flash_attention_forward(
            *rows, starts, starts, longest, longest, 0.0, is_causal, False, scale=scaling
        )
        return made[0][None], None
    lengths = cu_seq_lens_q.diff().tolist()
    pieces = zip(*(each.split(lengths, 2) for each in (query, key, value)), strict=True)
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    return torch.cat([attend(*each, is_causal=is_causal, scale=scaling) for each in pieces], 2).transpose(1, 2), None


_STARTS: list[Any] = [None, None]


def starts_of(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return where samples start in a pack, with its end, and the longest; all layers ask for the same."""
    if _STARTS[0] is not position_ids:
        first = torch.nonzero(position_ids[0] == 0).flatten()
        starts = torch.cat([first, first.new_tensor([position_ids.shape[1]])])
        _STARTS[:] = position_ids, (starts, int(starts.diff().max()))
    return _STARTS[1]


def check_attention(device: torch.device) -> None:
    """Raise if the device's kernels do not do what is asked of them."""
    attend: Any = attention
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 96, 80).bfloat16() for heads in (4, 2, 2))
    windows = {"cu_seq_lens_q": torch.tensor([0, 40, 96]), "max_length_q": 56}
    for options in (windows, {"position_ids": torch.cat([torch.arange(40), torch.arange(56)])[None]}):
        made = []
        for place in (torch.device("cpu"), device):
            own = {
                name: getattr(option, "to", lambda _, option=option: option)(place) for name, option in options.items()
            }
            inputs: list[Any] = [each.clone().to(place).requires_grad_() for each in (query, key, value)]
            output: Any = attend(None, *inputs, None, scaling=0.1, **own)[0]
            output.sum().backward()
            made.append([output.detach().cpu(), *(each.grad.cpu() for each in inputs)])
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


class Bench:
    """Data, a tokenizer and a device."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.device = torch.device(options.device)
        write(folder, options.samples, 64, [])
        yaml = render_dataset_yaml("CrudeWebdataset", None)
        prepare_dataset(folder / "data", split=parse_patterns(["train:.*"]), dataset_yaml=yaml)
        chooser = random.Random(SEED)
        self.tokenizer = train_tokenizer([texts(chooser, 50) for _ in range(200)], 1000, QWEN_TOKENS)

    def loader(self, dtype: str, mode: str, batch_size: int = 1, packed: bool = True) -> SavableDataLoader:
        """Return a loader whose batches get to the device in some way."""
        config = ChatConfig(seq_length=self.options.tokens, pixels_dtype=dtype, pad_to_max_length=packed)  # type: ignore[arg-type]
        encoder = Encoder(self.tokenizer, qwen_family("qwen2_5_vl", Qwen2VLImageProcessorPil()), config)
        workers = WorkerConfig(
            rank=0,
            world_size=1,
            num_workers=self.options.workers,
            pin_memory=mode != "at once" and self.is_cuda,
            device=self.device if mode == "copied ahead" else None,
            num_lanes=max(1, self.options.workers),
        )
        spec = get_train_dataset(
            self.folder / "data",
            batch_size=batch_size,
            task_encoder=encoder,
            worker_config=workers,
            packing_buffer_size=32 if packed else None,
        )
        return get_savable_loader(spec)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronise(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def on_device(self, batch: Any, mode: str) -> Any:
        if mode == "at once" and self.is_cuda:
            batch = pin_value(batch)
        return to_device(batch, self.device)

    # Parts -----------------------------------------------------------------------------------------------------------

    def steps(self) -> None:
        """Print the time of steps, and how much of it was waiting."""
        step = self._step()
        for dtype in self.options.dtypes:
            count = self.options.steps
            with closing(self.loader(dtype, "pinned ahead")) as loader:
                batches = [to_device(batch, self.device) for batch in islice(loader, count)]
            step(batches[0])
            self.synchronise()
            resident = [timed(partial(step, batch)) for batch in batches]
            size = statistics.mean(num_bytes(batch) for batch in batches) / 1e6
            rows = sum(len(batch.cu_seqlens) - 1 for batch in batches if hasattr(batch, "cu_seqlens")) / count
            print(
                f"{dtype}: {size:.1f} MB and {rows:.0f} conversations a batch; step on the device's own batch "
                f"{1e3 * statistics.median(seconds for seconds, _ in resident):.1f} ms",
                flush=True,
            )
            del batches
            for mode in MODES:
                with closing(self.loader(dtype, mode)) as loader:
                    self._measured(loader, mode, step, resident)

    def launches(self) -> None:
        """Print what steps and the launching thread take beside a loader, in rounds that mix its conditions."""
        step, count = self._step(), self.options.steps
        with closing(self.loader("uint8", "pinned ahead")) as loader:
            batches = [to_device(batch, self.device) for batch in islice(loader, count)]
        for batch in batches:
            step(batch)
        taken: dict[str, list[tuple[float, ...]]] = {}
        for _ in range(self.options.rounds):
            self._launches(taken, "no loader", step, batches)
            for mode in MODES[1:]:
                with closing(self.loader("uint8", mode)) as loader:
                    iterator = iter(loader)
                    first = next(iterator)
                    time.sleep(self.options.fill)
                    self._launches(taken, f"{mode}: idle", step, batches)
                    self._launches(taken, f"{mode}: read", step, batches, iterator)
                    self._launches(taken, f"{mode}: trained on", step, batches, iterator, own=True)
                    del first
        for name, rows in taken.items():
            wall, main, others, collected = (1e3 * statistics.median(each) for each in zip(*rows, strict=True))
            print(
                f"  {name:24} step {wall:.1f} ms (least {1e3 * min(row[0] for row in rows):.1f}); CPU of the thread "
                f"{main:.1f} ms, of others {others:.1f}; collecting garbage {collected:.1f} ms",
                flush=True,
            )

    def _launches(
        self,
        taken: dict[str, list[tuple[float, ...]]],
        name: str,
        step: Callable[[Any], float],
        batches: list[Any],
        iterator: Iterator[Any] | None = None,
        own: bool = False,
    ) -> None:
        spent = [0.0, 0.0]

        def collected(phase: str, _: dict[str, int]) -> None:
            now = time.perf_counter()
            if phase == "stop":
                spent[0] += now - spent[1]
            spent[1] = now

        gc.callbacks.append(collected)
        try:
            for number, batch in enumerate(batches):
                spent[0], start = 0.0, (time.perf_counter(), time.thread_time(), time.process_time())
                if iterator is not None:
                    read = next(iterator)
                    batch = to_device(read, self.device) if own else batch
                step(batch)
                wall, main, process = (
                    clock() - then
                    for clock, then in zip((time.perf_counter, time.thread_time, time.process_time), start, strict=True)
                )
                if number:
                    taken.setdefault(name, []).append((wall, main, process - main, spent[0]))
        finally:
            gc.callbacks.remove(collected)

    def _step(self) -> Callable[[Any], float]:
        model = self._model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)

        def step(batch: Any) -> float:
            loss = model(**model_inputs(batch, model)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return float(loss.detach())  # waits for the step, as a loop does that logs its loss

        return step

    def _measured(
        self, loader: SavableDataLoader, mode: str, step: Callable[[Any], float], resident: list[tuple[float, float]]
    ) -> None:
        iterator = iter(loader)
        first = next(iterator)
        time.sleep(self.options.fill)  # workers fill their queues
        waits, totals, losses, allocations = [], [], [], []
        for number, (alone, _) in enumerate(resident):
            start = time.perf_counter()
            batch = next(iterator) if number else first
            got = time.perf_counter()
            batch = self.on_device(batch, mode)
            ready = time.perf_counter()
            losses.append(step(batch))
            end = time.perf_counter()
            if number >= self.options.skip:
                waits.append((got - start, ready - got))
                totals.append((end - start) / alone)
            allocations.append(host_allocations())
        same = losses == [loss for _, loss in resident]
        gets, moves = (1e3 * statistics.median(each) for each in zip(*waits, strict=True))
        share = (gets + moves) / statistics.median(seconds for seconds, _ in resident) / 10
        print(
            f"  {mode:12} step {100 * (statistics.median(totals) - 1):+.2f} % (median of the same batches), next() "
            f"{gets:.2f} ms, moving {moves:.2f} ms, together {share:.2f} % of a step; losses "
            f"{'equal' if same else 'DIFFER'}; pinned allocations after the first {self.options.skip} steps: "
            f"{allocations[-1] - allocations[self.options.skip - 1]}{self._overlap(iterator, mode, step)}",
            flush=True,
        )

    def _overlap(self, iterator: Iterator[Any], mode: str, step: Callable[[Any], float]) -> str:
        """Return how much of the time of copies to the device falls in that of kernels."""
        if not self.is_cuda or not self.options.profile:
            return ""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for batch in islice(iterator, 3):
                step(self.on_device(batch, mode))
            torch.cuda.synchronize()
        copies: list[Any] = []
        kernels: list[Any] = []
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:  # type: ignore[attr-defined]
                span = event.time_range.start, event.time_range.end
                (copies if "HtoD" in event.name else kernels).append(span)
        copies = [span for span in copies if span[1] - span[0] > 50]  # those of batches
        total = sum(end - start for start, end in copies)
        if not total:
            return "; no copy seen"
        inside = sum(overlapping(span, sorted(kernels)) for span in copies)
        return f"; copies {total / 3e3:.2f} ms a step, {100 * inside / total:.0f} % of it beside kernels"

    def _model(self) -> Any:
        tiny = self.options.model == "tiny"
        token = self.tokenizer.convert_tokens_to_ids
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3] if tiny else [16, 24, 24]}
        text = TINY if tiny else TEXT
        config = Qwen2_5_VLConfig(
            text_config={
                **text,
                "num_key_value_heads": 2,
                "vocab_size": 2000 if tiny else 151936,
                "rope_parameters": rope,
                "max_position_embeddings": 32768,
                "tie_word_embeddings": True,
            },
            vision_config={**(TINY_VISION if tiny else VISION), "out_hidden_size": text["hidden_size"]},
            image_token_id=token("<|image_pad|>"),
            video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"),
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")
        finally:
            torch.set_default_dtype(before)
        if self.options.attention == "varlen":
            check_attention(self.device)
            for part in (model.config, model.config.text_config, model.config.vision_config):
                part._attn_implementation_internal = ATTENTION  # by way of the model, it looks for flash-attn
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        print(f"{sum(value.numel() for value in model.parameters()) / 1e9:.2f} billion parameters on {self.device}")
        return model

    def values(self) -> None:
        """Print the largest differences of pixels on the device from floats made on the CPU."""
        found = {}
        for dtype in DTYPES:
            with closing(self.loader(dtype, "copied ahead")) as loader:
                found[dtype] = model_inputs(next(iter(loader)))["pixel_values"]
        with closing(self.loader("float32", "at once")) as loader:
            expected = next(iter(loader)).pixel_values
        for dtype, values in found.items():
            exact = torch.equal(values.cpu(), expected.to(values.dtype))
            largest = (values.cpu().float() - expected).abs().max().item()
            print(f"{dtype} on {values.device}: {'equal' if exact else f'largest difference {largest:.2g}'}")

    def stress(self) -> None:
        """Print how many batches differ that were copied while the device was busy."""
        busy = torch.randn(2048, 2048, device=self.device)
        different, hashes = 0, []
        with closing(self.loader("uint8", "copied ahead", 4, packed=False)) as loader:
            for batch in islice(loader, self.options.batches):
                for _ in range(4):
                    busy = busy @ busy / 45.0
                hashes.append(hash_of(batch))  # on the device, and not waited for
                del batch
        with closing(self.loader("uint8", "at once", 4, packed=False)) as loader:
            for hashed, batch in zip(hashes, islice(loader, self.options.batches), strict=True):
                different += int(hashed) != int(hash_of(batch))
        print(f"{len(hashes)} batches copied beside kernels: {different} differ from the CPU's")

    def nvjpeg(self) -> None:
        """Print values and speed of the GPU's JPEG decoder."""
        from torchvision.io import ImageReadMode, decode_jpeg  # type: ignore[import-not-found]

        generator = np.random.default_rng(SEED)
        files = [jpeg(generator, SIZE) for _ in range(256)]
        data = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
        on_gpu = partial(decode_jpeg, mode=ImageReadMode.RGB, device=str(self.device))
        decoder = SampleDecoder(image_decode="torchrgb8")
        ours = [decoder.decode("jpg", file) for file in files]
        pillow = [torch.from_numpy(np.array(Image.open(io.BytesIO(file)))).permute(2, 0, 1) for file in files[:32]]
        alone = [on_gpu([one])[0].cpu() for one in data[:64]]
        together = [image.cpu() for image in on_gpu(data[:64])]
        again = [image.cpu() for image in on_gpu(data[63::-1])][::-1]
        print(
            f"nvJPEG: from the loader's decoder {differences(together, ours)} (Pillow {differences(pillow, ours)}); "
            f"alone and in a batch {'equal' if same_images(alone, together) else 'DIFFER'}, in another order "
            f"{'equal' if same_images(again, together) else 'DIFFER'}"
        )
        for size in (1, 8, 64, 256):
            self.synchronise()
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                for at in range(0, 256, size):
                    on_gpu(data[at : at + size])
                self.synchronise()
                seconds.append(time.perf_counter() - start)
            print(f"  batches of {size}: {256 / min(seconds):.0f} images/s")
        start = time.process_time()
        for file in files:
            decoder.decode("jpg", file)
        print(f"  the loader's decoder: {256 / (time.process_time() - start):.0f} images/s of a core")


def timed(function: Callable[[], float]) -> tuple[float, float]:
    start = time.perf_counter()
    value = function()
    return time.perf_counter() - start, value


def num_bytes(batch: Any) -> int:
    sizes: list[int] = []
    over_tensors(batch, lambda tensor: sizes.append(tensor.nbytes), "data_ptr")
    return sum(sizes)


def hash_of(batch: Any) -> torch.Tensor:
    """Return a number that depends on every byte of the pixels and every token, on their device."""
    parts: list[torch.Tensor] = []
    for tensor in (batch.pixel_values, batch.tokens):
        flat = tensor.flatten().to(torch.int64)
        places = torch.arange(len(flat), device=flat.device) % 65521 + 1
        parts.append((flat * places).sum())
    return torch.stack(parts).sum()


def host_allocations() -> int:
    """Return how often pinned memory was asked for from the system."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("num_host_alloc", -1))


def overlapping(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Return how much of a span sorted other ones cover."""
    covered, until = 0.0, span[0]
    for start, end in others:
        start = max(start, until)
        end = min(end, span[1])
        if end > start:
            covered += end - start
            until = end
    return covered


def same_images(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def differences(some: list[torch.Tensor], others: list[torch.Tensor]) -> str:
    each = [(one.int() - other.int()).abs() for one, other in zip(some, others, strict=False)]
    mean = statistics.mean(one.float().mean().item() for one in each)
    return f"at most {max(one.max().item() for one in each)} of 255, {mean:.3f} in the mean"


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=("3B", "tiny"), default="3B")
    parser.add_argument("--attention", choices=("varlen", "sdpa"), default="varlen")
    parser.add_argument("--tokens", type=int, default=8192, help="of a pack")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4, help="of the part launches")
    parser.add_argument("--skip", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--batches", type=int, default=300, help="of the part stress")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--fill", type=float, default=3.0, help="seconds for workers to start")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    if options.device != "cpu":
        print(torch.cuda.get_device_name(), torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for part in options.parts:
            print(f"== {part}", flush=True)
            getattr(bench, part)()


if __name__ == "__main__":
    main()
