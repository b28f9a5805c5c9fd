"""Conversations: read from samples, rendered as text, and as tokens, labels and masks for a model.

`conversation` has their types, `turns` reads the dialects of lists, `sample_encoders` those of sample types;
`questions` adds what belongs to a question, `places` finds where media stand in a text. `layout`,
`rendering`, `templates` and `texts` make text of them, `sequences` and `inputs` what a model takes; `multimodal` is an
encoder, and `batching` what it shares with that of `families`.
"""
