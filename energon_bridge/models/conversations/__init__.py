"""Conversations: read from samples, rendered as text, and as tokens, labels and masks for a model.

It imports the core and its neighbours in `models/`. Begin with `conversation`: the types, and how a sample becomes one.
Reading: `turns` decides which forms of lists are understood, `questions` what belongs to a question beside its text,
`places` which spellings are placeholders of media, `segments` which part of a video or sound is meant,
`sample_encoders` what each sample type says, `cooker` does it for crude samples. Rendering: `layout` puts the text of
fixed templates around turns, `templates` and `rendering` run chat templates and find the answers in them. Tokens:
`texts` tokenises, `sequences` has samples and batches, `batching` what both encoders share, `multimodal` is one of
them (the other: `families/chat_encoder.py`); `inputs` makes a model's arguments of a batch.
"""
