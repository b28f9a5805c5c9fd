"""One lane's pipeline: references become bytes, values, encoded samples and microbatches."""
