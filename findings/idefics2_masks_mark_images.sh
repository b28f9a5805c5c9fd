#!/usr/bin/env bash
# transformers 5.24.0: the assistant mask of Idefics2's processor marks tokens of the image instead of the answer.
#
# With `return_assistant_tokens_mask=True` a template's {% generation %} parts become a mask over tokens. The places are
# found in the text before images become many tokens; the shared code of processors then moves them, but Idefics2 has
# expanded its images itself and tells nobody by how much. Behind an image the mask so points too far to the front: a
# model trained by it learns to write the image's placeholders and not the answer. Idefics3 is right. Nothing warns.
#
# Seen with transformers 5.24.0, torch 2.13.0 (CPU), pillow 13.0.0, Python 3.11 (tokens that the mask marks):
#   Idefics2 without image: yes it is; with image: <image> <image>
#   Idefics3 without image: yes it is; with image: yes it is
#
# Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0"
"$folder/env/bin/pip" install --quiet "transformers==5.24.0" "pillow==13.0.0" jinja2 num2words
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Idefics2ImageProcessorPil,
    Idefics2Processor,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }} "
    "{% if turn.role == 'assistant' %}{% generation %}{{ turn.content[0].text }}{% endgeneration %}"
    "{% else %}{% for part in turn.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %} {% endfor %}"
)
WORDS = ["<unk>", "user", "assistant", "is", "this", "red", "yes", "it"]


def tokenizer():
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")


def marked(processor, image):
    question = [{"type": "text", "text": "is this red"}]
    if image:
        question.insert(0, {"type": "image", "image": Image.new("RGB", (64, 64))})
    answer = [{"type": "text", "text": "yes it is"}]
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    out = processor.apply_chat_template(
        [turns], chat_template=TEMPLATE, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(out["input_ids"][0], out["assistant_masks"][0], strict=True)
    return processor.tokenizer.decode([int(token) for token, mask in pairs if mask])


print(version("transformers"))
found = {}
for name, processor in (
    ("Idefics2", Idefics2Processor(Idefics2ImageProcessorPil(do_image_splitting=False), tokenizer(), image_seq_len=8)),
    ("Idefics3", Idefics3Processor(Idefics3ImageProcessorPil(do_image_splitting=False), tokenizer(), image_seq_len=8)),
):
    found[name] = [marked(processor, image) for image in (False, True)]
    print(f"{name} without image: {found[name][0]}; with image: {found[name][1]}")
assert found["Idefics3"] == ["yes it is", "yes it is"]
assert found["Idefics2"][0] == "yes it is"
assert set(found["Idefics2"][1].split()) == {"<image>"}
PYTHON
