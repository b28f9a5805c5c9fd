"""What models need of samples: conversations as tokens and labels, pixels, sound, packs; families of Hugging Face.

It imports the core only.

Begin with `families/chat_encoder.py`, the task encoder for models of Hugging Face, or `conversations/multimodal.py`,
the one for a tokenizer and an image processor of your own. `conversations/` decides what is asked and what is learned,
`families/` how many tokens an image, video or sound takes, `images/` how pixels are decoded and resized, `av/` which
frames and sounds of a file are read, `packing/` which samples share a row.
"""
