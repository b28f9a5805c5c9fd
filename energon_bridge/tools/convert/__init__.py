"""Tables as people have them, row by row: parquet files, Hugging Face datasets on disk, JSON, CSV.

`energon convert` writes their rows into shards; parquet files and Hugging Face datasets are also read as they are.
"""
