"""megatron-core's own MIMO model (mock sizes): two grids train as one that is never stopped, over kills, on any sizes.

The model of one grid runs whole, `MimoModel.forward`, on each microbatch of a global batch. Of two grids, encoder ranks
run its vision part and send the features of each language rank to it; language ranks send the gradients back. In the
middle of a step one rank kills itself; the other ranks are killed then, as a launcher does it, and the next run goes on
from the last checkpoint of weights and data, on grids of other sizes.
"""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on_gloo, start_forked
from grids import pictures_dataset
from made import made_once
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from families import encoder_of
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo import MimoModel, MimoModelConfig
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_bridge import EnergonMultiModalDataModule
from energon_bridge.core.encoder.cooking import Cooker
from energon_bridge.models.conversations.cooker import cook_conversation
from energon_bridge.models.families import ChatConfig, ChatTemplateTaskEncoder
from energon_bridge.trainers.roles import make_roles
from energon_bridge.trainers.roles.mimo import MimoEncoder, mimo_inputs
from energon_bridge.training.megatron.model import SharedAttention

data = made_once(partial(pictures_dataset, side=40))
GLOBAL = 4  # microbatches of a global batch
WHERE = {"vision": MimoEncoder(module="images", encoder="clip", arguments={"pixel_values": "x"})}
RATE = 1e-4  # of gradients of sums: a larger one makes differences of rounding grow
STEPS = 50
EVERY = 4  # steps between checkpoints
LONG = bool(os.environ.get("ENERGON_LONG_TESTS"))


class Chats(ChatTemplateTaskEncoder):
    cookers = (Cooker(cook_conversation),)


def task_encoder() -> Chats:
    known = encoder_of("llava")
    return Chats(known.tokenizer, known.family, ChatConfig(seq_length=96))


def image_token() -> int:
    token: int = task_encoder().tokenizer.convert_tokens_to_ids("<image>")
    return token


def sizes(hidden: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=2 * hidden,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        add_bias_linear=True,
        activation_func=torch.nn.functional.gelu,
    )


def model() -> MimoModel:
    """Return the model with the same weights in each process.

    In float64: 1e-6 is then far above what another order of sums makes of 50 steps, and below what a sample makes.
    """
    warnings.filterwarnings("ignore")
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[assignment,method-assign]  # in a process of its own
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    parallel_state.initialize_model_parallel()
    torch.manual_seed(5)
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    vision = get_vit_layer_with_local_spec()
    vision.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    clip = {"transformer_config": sizes(16), "transformer_layer_spec": vision, "add_class_token": False}
    clip |= {"ln_pre_impl": WrappedTorchNorm, "ln_post_impl": WrappedTorchNorm}
    projection = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    projector = {"config": sizes(32), "submodules": projection, "projector_type": "mlp", "input_size": 16}
    causal = get_gpt_layer_local_spec()
    causal.submodules.self_attention.submodules.core_attention = SharedAttention
    language = {"config": sizes(32), "transformer_layer_spec": causal, "vocab_size": 384}
    parts = {
        "encoders": {"clip": ModuleSpec(CLIPViTModel, params=clip | {"patch_dim": 8, "img_h": 16, "img_w": 16})},
        "input_projections": [ModuleSpec(MultimodalProjector, params=projector)],
    }
    whole = MimoModel(
        MimoModelConfig(
            language_model_spec=ModuleSpec(GPTModel, params=language | {"max_sequence_length": 128}),
            modality_submodules_spec={"images": ModuleSpec(VisionModalitySubmodules, submodules=parts)},
            special_token_ids={"images": image_token()},
        )
    )
    return whole.double()


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A run on grids of some sizes, until it ends or a rank is killed.

    `together`: processes that have both models, where ranks of the smaller grid are several processes each; 0: each
    process has one model, those of the language model first. `until`: the step at which the run ends, or in the middle
    of which the process `victim` kills itself.
    """

    language: int
    vision: int
    until: int
    victim: int | None = None
    together: int = 0
    workers: int = 0

    @property
    def world(self) -> int:
        return self.together or self.language + self.vision

    def ranks(self, name: str) -> list[int | None]:
        """Return the rank of each process on a grid."""
        size = self.language if name == "language" else self.vision
        if self.together:
            return [process * size // self.together for process in range(self.together)]
        first = 0 if name == "language" else self.language
        return [process - first if 0 <= process - first < size else None for process in range(self.world)]


def by_role(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of each role: this test sends features itself, so media side by side need not be level."""
    return {name: arguments({name: batch}) for name, batch in step.items()}


def arguments(step: Mapping[str, Any]) -> dict[str, Any]:
    inputs = mimo_inputs(step, WHERE)
    for of_encoder in inputs["modality_inputs"].values():
        of_encoder["clip"]["x"] = of_encoder["clip"]["x"].double()
    return inputs


def module(data: Path, grids: dict[str, Any], state: Any = None, workers: int = 0) -> EnergonMultiModalDataModule:
    train = EnergonMultiModalDataModule(
        str(data),
        None,
        task_encoder=task_encoder(),
        micro_batch_size=2,
        global_batch_size=2 * GLOBAL,
        num_workers=workers,
        num_lanes=24,
        pin_memory=False,
        roles=make_roles(grids=grids),
    )
    if state is not None:
        train.load_state_dict(state)
    return train


def summed(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum()


def update(mimo: MimoModel) -> None:
    with torch.no_grad():
        for parameter in mimo.parameters():
            if parameter.grad is not None:
                parameter -= RATE * parameter.grad
                parameter.grad = None


def gradients_of(part: torch.nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in part.named_parameters()}


def part_of(mimo: MimoModel, name: str) -> torch.nn.Module:
    return mimo.language_model if name == "language" else mimo.modality_submodules


@cache
def one_grid(data: Path) -> tuple[list[float], list[dict[str, Any]], dict[str, Any]]:
    """Return the loss and the gradients of each step, by part of the model, and the weights of the parts at the end."""

    def run(_: int) -> Any:
        torch.set_num_threads(1)
        mimo = model()
        train = module(data, {"language": (0, 1), "vision": (0, 1)})
        train.train_dataloader().on_delivery = arguments
        batches = iter(train.train_dataloader())
        losses: list[float] = []
        gradients = []
        for _ in range(STEPS):
            total = 0.0
            for _ in range(GLOBAL):
                inputs = next(batches)
                del inputs["packing_kwargs"]
                out, mask = mimo(**inputs)
                loss = summed(out, mask)
                loss.backward()
                total += float(loss)
            losses.append(total)
            gradients.append({name: gradients_of(part_of(mimo, name)) for name in ("language", "vision")})
            update(mimo)
        train.close()
        return losses, gradients, {name: part_of(mimo, name).state_dict() for name in ("language", "vision")}

    ((losses, gradients, weights),) = on_gloo(1, run)
    assert losses[-1] < 0.9 * losses[0]
    return losses, gradients, weights


def two_grids(leg: Leg, data: Path, folder: Path, process: int) -> None:
    """Train from the last checkpoint in a folder, and leave what each step came to, and checkpoints, there."""
    torch.set_num_threads(1)
    mimo = model()
    ranks = {name: leg.ranks(name) for name in ("language", "vision")}
    groups = {
        name: dist.new_group([one for one, rank in enumerate(found) if rank is not None])
        for name, found in ranks.items()
    }
    own = [name for name, found in ranks.items() if found[process] is not None]
    step, state = 0, None
    if (folder / "checkpoint").exists():
        step, state = torch.load(folder / "checkpoint", weights_only=False)
        for name in own:
            part_of(mimo, name).load_state_dict(torch.load(folder / f"{name}-at-{step}", weights_only=False))
    if leg.together:
        grids: dict[str, Any] = {name: (ranks[name][process], getattr(leg, name)) for name in ranks}
    else:
        grids = {name: group if name in own else None for name, group in groups.items()}
    train = module(data, grids, state, leg.workers)
    train.train_dataloader().on_delivery = by_role
    batches = iter(train.train_dataloader())
    while leg.victim is not None or step < leg.until:
        total = torch.zeros(1)
        for number in range(1, GLOBAL // leg.language + 1):
            last = step == leg.until and number == GLOBAL // leg.language
            total += turn(mimo, next(batches), train.roles, killed=last and process == leg.victim)
        for name in own:
            peers = max(1, leg.together // getattr(leg, name))
            reduced = gradients_of(part_of(mimo, name))
            for gradient in [*reduced.values()] + [total] * (name == "language"):
                dist.all_reduce(gradient, group=groups[name])
                gradient /= peers
            for key, parameter in part_of(mimo, name).named_parameters():
                parameter.grad = reduced[key]
            if ranks[name].index(0) == process:
                torch.save((float(total), reduced), folder / f"{name}-step-{step}")
        update(mimo)
        step += 1
        if step % EVERY == 0 or step == leg.until:
            state = train.state_dict()
            for name in own:
                if ranks[name].index(0) == process:
                    torch.save(part_of(mimo, name).state_dict(), folder / f"{name}-at-{step}")
            dist.barrier()
            if process == 0:
                torch.save((step, state), folder / "new")
                (folder / "new").rename(folder / "checkpoint")
    train.close()


def told(value: Mapping[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
    """Return what all processes tell, by language rank and part of its media."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return {key: one for of_process in found for key, one in of_process.items()}


def turn(mimo: Any, inputs: dict[str, Any], roles: Any, *, killed: bool) -> Tensor:
    """Run a microbatch of each language rank forward and backward; return the loss of this process."""
    loss = torch.zeros(1)
    features = torch.zeros(0, 32, dtype=torch.float64)
    own: list[tuple[int, int]] = []
    pieces: Sequence[Tensor] = ()
    if "vision" in inputs:
        part, parts = roles.part("vision")
        own = [(lane, part) for lane in roles.served("vision")]
        media = inputs["vision"]
        if media["modality_inputs"]:
            features = mimo.modality_submodules["images"].forward(encoder_inputs=media["modality_inputs"]["images"])
        counts = [len(features)]
        if parts == 1:  # as megatron-core does it: by the special tokens of the rows
            rows = torch.eq(media["input_ids"], image_token()).sum(1)
            counts = rows.reshape(len(own), -1).sum(1).tolist()
        assert sum(counts) == len(features)
        pieces = features.split(counts)
    sent = told({key: piece.detach() for key, piece in zip(own, pieces, strict=True)})
    received: dict[tuple[int, int], Tensor] = {}
    if "language" in inputs:
        text = inputs["language"]
        assert text["modality_inputs"] == {}
        (lane,) = roles.served("language")
        received = {key: sent[key].requires_grad_() for key in sorted(sent) if key[0] == lane}
        tokens, positions = text["input_ids"], text["position_ids"]
        embeddings = {
            "images": torch.cat([*received.values()]),
            "text": mimo.get_text_embeddings(tokens, positions, mimo.special_token_ids),
        }
        combined = mimo.align_embeddings_by_token_positions(embeddings, tokens, mimo.special_token_ids)
        out = mimo.language_model(
            input_ids=None, position_ids=None, attention_mask=None, decoder_input=combined, labels=text["labels"]
        )
        loss = summed(out, text["loss_mask"]).reshape(1)
        loss.backward()
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    back = told({key: one.grad for key, one in received.items() if one.grad is not None})
    if len(features):
        features.backward(
            torch.cat([back[key] if len(piece) else piece for key, piece in zip(own, pieces, strict=True)])
        )
    return loss.detach()


def run(leg: Leg, data: Path, folder: Path) -> None:
    """Run a leg to its end, or until its victim is dead, and kill the other processes then."""
    if leg.victim is None:
        on_gloo(leg.world, partial(two_grids, leg, data, folder))
        return

    def start(process: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=process, world_size=leg.world)
        two_grids(leg, data, folder, process)

    children = [start_forked(partial(start, process)) for process in range(leg.world)]
    end = children[leg.victim].result()
    for child in children:
        child.kill()
    ends = [child.result() for child in children if child is not children[leg.victim]]
    (folder / "store").unlink()
    assert end == (False, "no result, exit status -9"), [end, *ends]


def assert_steps_of_one_grid(data: Path, folder: Path) -> set[int]:
    """Assert that all steps that a leg has left in a folder came to the same as on one grid; return which they are."""
    losses, gradients, _ = one_grid(data)
    found: dict[str, set[int]] = {"language": set(), "vision": set()}
    for file in folder.glob("*-step-*"):
        name, _, number = file.name.split("-")
        loss, of_step = torch.load(file)
        if name == "language":
            assert loss == pytest.approx(losses[int(number)], rel=1e-6), file.name
        expected = gradients[int(number)][name]
        assert of_step.keys() == expected.keys()
        for key, gradient in expected.items():
            assert torch.allclose(of_step[key], gradient, rtol=0, atol=1e-6 * max(1, float(gradient.abs().max()))), key
        found[name].add(int(number))
        file.unlink()
    return found["language"] & found["vision"]


def drawn(rng: random.Random) -> Iterator[Leg]:
    """Draw legs until they have trained all steps."""
    step = 0
    while step < STEPS:
        language, vision = rng.choice([(4, 2), (2, 4), (4, 4), (2, 2), (1, 4), (4, 1)])
        together = rng.choice([0, 0, 4, 8])
        until = step + rng.randint(EVERY, 4 * EVERY)
        world = together or language + vision
        leg = Leg(
            language=language, vision=vision, together=together, until=min(until, STEPS), workers=rng.randint(0, 1)
        )
        yield replace(leg, victim=rng.randrange(world) if until < STEPS else None)
        step = until // EVERY * EVERY if until < STEPS else STEPS


FIXED = [
    Leg(language=4, vision=2, until=14, victim=1),
    Leg(language=2, vision=4, until=25, victim=4),
    Leg(language=4, vision=4, until=34, victim=6),
    Leg(language=4, vision=2, together=4, until=42, victim=3),
    Leg(language=2, vision=2, until=STEPS),
]
"""Killed: a language rank, two encoder ranks, a process that has both."""


TOGETHER = [
    Leg(language=2, vision=4, together=4, until=10, victim=2),
    Leg(language=4, vision=2, together=8, until=19, victim=5),
    Leg(language=2, vision=4, together=8, until=30, victim=1),
    Leg(language=4, vision=4, together=4, until=39, victim=0),
    Leg(language=4, vision=2, together=4, until=STEPS),
]
"""On four and eight processes that have both models."""
CHAINS = {"fixed": FIXED, "together": TOGETHER} | {f"seed {seed}": [*drawn(random.Random(seed))] for seed in range(3)}


@pytest.mark.parametrize("chain", CHAINS if LONG else ["fixed"])
def test_two_grids_train_as_one_over_kills_and_other_sizes(data: Path, tmp_path: Path, chain: str) -> None:
    steps: set[int] = set()
    for leg in CHAINS[chain]:
        run(leg, data, tmp_path)
        made = assert_steps_of_one_grid(data, tmp_path)
        assert max(made) == leg.until - 1, leg
        steps |= made
    assert steps == set(range(STEPS))
    for name, weights in one_grid(data)[2].items():
        found = torch.load(tmp_path / f"{name}-at-{STEPS}", weights_only=False)
        assert all(
            torch.allclose(found[key], one, rtol=0, atol=1e-6) for key, one in weights.items() if one is not None
        )
