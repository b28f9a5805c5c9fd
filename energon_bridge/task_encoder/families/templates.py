"""Chat templates of the families, for tokenizers without one (those of tiny models, say).

A conversation is a list of messages; the content of each is a text or a list of parts `{"type": "text", "text": …}`,
`{"type": "image"}` and `{"type": "video"}`. A template writes the placeholder token once for each image or video.
"""

from __future__ import annotations

_PARTS = (
    "{%- macro parts(content) -%}"
    "{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'image' -%}{{ IMAGE }}"
    "{%- elif part.type == 'video' -%}{{ VIDEO }}"
    "{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
)


def _with_parts(template: str, image: str, video: str) -> str:
    return _PARTS.replace("IMAGE", repr(image)).replace("VIDEO", repr(video)) + template


_CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + parts(message.content) + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

CHATML_TEMPLATE = _with_parts(_CHATML, "<image>", "<video>")
"""ChatML: `<|im_start|>role`, a line break, the text, `<|im_end|>`, a line break; `<image>` for an image."""

QWEN_VL_TEMPLATE = _with_parts(
    _CHATML, "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
)
"""ChatML with the tokens of Qwen2-VL, Qwen2.5-VL and Qwen3-VL around each image and video."""

LLAVA_TEMPLATE = _with_parts(
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{{ 'ASSISTANT:' }}{%- generation -%}{{ ' ' + parts(message.content) + eos_token }}{%- endgeneration -%}"
    "{%- elif message.role == 'system' -%}{{ parts(message.content) + ' ' }}"
    "{%- else -%}{{ 'USER: ' + parts(message.content) + ' ' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}",
    "<image>\n",
    "<video>\n",
)
"""LLaVA 1.5: `SYSTEM USER: <image>`, a line break, `question ASSISTANT: answer</s>`; the answers are marked."""
