#!/usr/bin/env bash
# transformers 5.24.0: PaliGemma 1 without `token_type_ids` sees the answers that it learns, with the default attention.
#
# Its configuration sets `use_bidirectional_attention`, so Gemma's attention layers are not causal by themselves. Without
# `token_type_ids` the mask is a plain causal one, which is left out for sdpa, and the layers attend to all tokens: each
# token of an answer sees those behind it, and the loss means nothing. A mask of ones, or labels, change nothing, and
# nothing warns. With eager attention the same call is causal, and so is PaliGemma 2.
#
# Seen with transformers 5.24.0, torch 2.13.0, Python 3.11 (what a token changes at the one before it):
#   gemma sdpa 0.01, gemma eager 0, gemma sdpa with token_type_ids 0, gemma2 default 0
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0"
"$folder/env/bin/pip" install --quiet "transformers==5.24.0"
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - <<'PYTHON'
import torch
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
vision |= sizes | {"projection_dim": 32, "vision_use_head": False}


def leak(kind, attention, **more):
    """How far the last of six tokens changes what is predicted at the one before it."""
    torch.manual_seed(0)
    text = {"model_type": kind, "vocab_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 8} | sizes
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=63, projection_dim=32)
    model = PaliGemmaForConditionalGeneration(config).train()
    if attention != "default":
        model.set_attn_implementation(attention)
    with torch.no_grad():
        given = [torch.tensor([[5, 6, 7, 8, 9, last]]) for last in (10, 21)]
        one, other = (model(input_ids=tokens, labels=tokens, **more).logits[0, 4] for tokens in given)
    return float((one - other).abs().max())


types = torch.tensor([[0, 0, 0, 0, 1, 1]])
found = {
    "gemma sdpa": leak("gemma", "sdpa"),
    "gemma eager": leak("gemma", "eager"),
    "gemma sdpa with token_type_ids": leak("gemma", "sdpa", token_type_ids=types),
    "gemma2 default": leak("gemma2", "default"),
}
print(found)
first, *others = found.values()
assert first > 1e-3 and not any(others), "the behaviour has changed"
PYTHON
