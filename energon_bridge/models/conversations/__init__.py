"""Conversations: read from samples, rendered as text, and as tokens, labels and masks for a model.

`conversation` has their types, `turns` reads the dialects of lists, `sample_encoders` those of sample types. `layout`,
`templates` and `texts` render them, `sequences` and `inputs` build what a model takes; `multimodal` is the encoder.
"""
