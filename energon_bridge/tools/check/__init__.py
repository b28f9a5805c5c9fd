"""Is a dataset as it should be: lint, media metadata, samples that failed, and the index of joins.

`lint` looks at prepared datasets, `dataset_summary` describes them, `media` measures files, `engines` runs tasks of
preparation on processes, Ray or SLURM, `quarantine` reads what a run has left out.
"""
