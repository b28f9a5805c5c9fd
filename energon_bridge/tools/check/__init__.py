"""Is a dataset as it should be: lint, media metadata, samples that failed.

It imports the core, models, `columns/` and `convert/`. Begin with `lint`, which decodes each sample as training does
and decides what is a problem. `dataset_summary` describes a dataset without reading samples, `state_summary` a state of
a run, `media` reads sizes and lengths of media, `joins` builds the indexes of joins before training, `dataset_yaml`
writes that file,
`engines` runs work on shards in a Ray cluster, `quarantine` reads the samples that failed in a run.
"""
