"""One rank of Megatron-LM's multimodal example, run as it is up to the model, with one of the two `megatron.energon`.

Started by `scripts/multimodal-tests`, with a JSON of settings as its argument and the variables of torch's `env://`.
The provider, the task encoder, the tokenizer, the process groups and the function that saves the state are those of the
checkout. In place: its command line (the arguments are set), and torchvision, of which Pillow does what is asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from argparse import Namespace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from PIL import Image

SETTINGS = json.loads(sys.argv[1])
PASS = 2  # batches that are validated per optimizer step


def torchvision() -> None:
    """Put what the example imports of torchvision into `sys.modules`."""

    def resize(size: tuple[int, int], interpolation: Any) -> Any:
        return lambda image: image.resize(size[::-1], interpolation)

    def to_tensor() -> Any:
        return lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255

    def normalize(mean: list[float], std: list[float]) -> Any:
        return lambda image: (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    def compose(steps: list[Any]) -> Any:
        def run(image: Any) -> Any:
            for step in steps:
                image = step(image)
            return image

        return run

    transforms: Any = types.ModuleType("torchvision.transforms")
    transforms.Compose, transforms.Lambda, transforms.Resize = compose, lambda function: function, resize
    transforms.ToTensor, transforms.Normalize = to_tensor, normalize
    transforms.ToPILImage = lambda: lambda image: Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy())
    functional: Any = types.ModuleType("torchvision.transforms.functional")
    functional.InterpolationMode = Namespace(BICUBIC=Image.Resampling.BICUBIC)
    package: Any = types.ModuleType("torchvision")
    package.transforms = transforms
    sys.modules |= {
        "torchvision": package,
        "torchvision.transforms": transforms,
        "torchvision.transforms.functional": functional,
    }


def arguments() -> Namespace:
    """Return the arguments of the example that its data reads."""
    return Namespace(
        micro_batch_size=1 if SETTINGS["packing"] else 2,
        eval_iters=SETTINGS["eval_iters"],
        num_workers=SETTINGS["workers"],
        data_path=[SETTINGS["data"]],
        prompt_path=SETTINGS["prompts"],
        dataloader_seq_length=None,
        decoder_seq_length=1024,
        packing_seq_length=700,
        packing_buffer_size=8 if SETTINGS["packing"] else None,
        img_h=28,
        img_w=28,
        patch_dim=14,
        vision_model_type="clip",
        disable_vision_class_token=False,
        pixel_shuffle=False,
        use_tile_tags=False,
        use_tiling=True,
        max_num_tiles=2,
        use_thumbnail=True,
        tokenizer_prompt_format="qwen2p0",
        use_area_weighted_aspect_ratio=False,
        freeze_LM=False,
        num_frames=1,
        fp8=None,
        fp8_recipe=None,
        context_parallel_size=1,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        load=SETTINGS["states"] if SETTINGS["iteration"] else None,
        dataloader_save=SETTINGS["states"],
        iteration=SETTINGS["iteration"],
    )


def rows_of(batch: dict[str, Any], tokenizer: Any, image_token: int, embeddings: int) -> list[list[Any]]:
    """Return key, images and answer of each sample of a batch, also of those that were packed."""
    tiles, images = batch["num_tiles"].flatten().tolist(), batch["imgs"]
    rows, tile, picture = [], 0, 0
    for number, key in enumerate(batch["__key__"]):
        tokens, labels = batch["tokens"][number].tolist(), batch["labels"][number].tolist()
        keys = key.split(",") if SETTINGS["packing"] else [key]
        ends = batch["cu_lengths"][number].tolist()[1:] if SETTINGS["packing"] else [sys.maxsize]
        at = place = 0
        for one, end in zip(keys, ends, strict=True):
            answer, seen = [], hashlib.sha1()
            while place < end and at < len(tokens):
                if tokens[at] == image_token:
                    count = tiles[picture]
                    seen.update(images[tile : tile + count].numpy().tobytes())
                    tile, picture, place = tile + count, picture + 1, place + count * embeddings
                else:
                    place += 1
                answer += [] if labels[at] in (-100, tokenizer.pad) else [labels[at]]
                at += 1
            rows.append([one, seen.hexdigest(), tokenizer.detokenize(answer)])
    return rows


def digest(batch: dict[str, Any]) -> str:
    """Return a digest of everything that training reads of a batch."""
    found = hashlib.sha1(json.dumps(batch["__key__"]).encode())
    for name in ("tokens", "labels", "imgs", "num_tiles", "cu_lengths", "max_lengths"):
        found.update(batch[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """Train, save, go on, and validate; write what was seen."""
    sys.path[:0] = [SETTINGS["checkout"], os.path.join(SETTINGS["checkout"], "examples/multimodal")]
    if SETTINGS["ours"]:
        from energon_bridge.compat import install

        install(trust_remote_code=True)
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.models.multimodal.llava_model import IMAGE_TOKEN
    from megatron.core.models.vision.clip_vit_model import get_num_image_embeddings
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.tokenizers.vision.libraries.multimodal_tokenizer import MegatronMultimodalTokenizer
    from megatron.training import global_vars
    from megatron.training.checkpointing import maybe_save_dataloader_state

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel()
    args = arguments()
    num_microbatches_calculator.init_num_microbatches_calculator(
        0, None, args.micro_batch_size * ranks * PASS, args.micro_batch_size, ranks
    )
    tokenizer = MegatronMultimodalTokenizer(SETTINGS["tokenizer"], "qwen2p0", [IMAGE_TOKEN], "")
    global_vars.set_args(args)
    global_vars._GLOBAL_TOKENIZER = tokenizer

    torchvision()  # after transformers, which asks whether there is one
    from dataloader_provider import train_valid_test_dataloaders_provider  # type: ignore[import-not-found]

    train, valid, _test = train_valid_test_dataloaders_provider((10**6, 100, 0))
    embeddings = get_num_image_embeddings(28, 28, 14, "clip", False, 1, False)
    shown = (tokenizer, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), embeddings)
    iterator = RerunDataIterator(train)
    rows, digests = [], []
    for step in range(SETTINGS["iteration"], SETTINGS["steps"]):
        batch = next(iterator)
        digests.append(digest(batch))
        rows += rows_of(batch, *shown)
        if step + 1 == SETTINGS["save_at"]:
            maybe_save_dataloader_state(iterator, step + 1, args.dataloader_save)
    evaluated = [
        [[rows_of(next(one), *shown) for _ in range(args.eval_iters * PASS)] for one in valid]
        for _ in range(2 if valid else 0)
    ]
    with open(f"{SETTINGS['out']}.{torch.distributed.get_rank()}", "w") as file:
        json.dump({"train": rows, "digests": digests, "valid": evaluated}, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
