"""What models need of samples: conversations as tokens and labels, pixels, sound, packs; families of Hugging Face.

It imports the core only.

Begin with `families/`, the encoders of models by their processors, or with `conversations/multimodal.py`, the encoder
for a tokenizer and pixels of one's own. `conversations/` reads, renders and labels turns; `images/` decodes, resizes
and lays out pixels; `av/` decodes video and sound; `packing/` chooses which samples share a pack or a batch, and joins
them.
"""
