"""Conversations about images up to the tensors of a model, from the files of the model; `job.mode` is MODEL/LIBRARY.

Ours: `ChatTemplateTaskEncoder.from_pretrained`. webdataset and megatron-energon: the processor of transformers, called
with the samples of a batch, as its documentation shows. Their labels are all tokens but padding and images, ours the
answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.systems.measure import Job, main

SEQ_LENGTH = 16_384


class Collate:
    """What tutorials write: the processor takes the conversations and images of a batch."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(folder)
        self.image = self.processor.tokenizer.convert_tokens_to_ids(self.processor.image_token)

    def __call__(self, samples: list[tuple[Any, Any]]) -> dict[str, Any]:
        texts = [self.processor.apply_chat_template(record["messages"], tokenize=False) for _, record in samples]
        images = [[image] for image, _ in samples]
        batch = dict(self.processor(text=texts, images=images, padding=True, return_tensors="pt"))
        hidden = (batch["attention_mask"] == 0) | (batch["input_ids"] == self.image)
        return batch | {"labels": batch["input_ids"].masked_fill(hidden, -100)}


def with_webdataset(job: Job, collate: Collate) -> Any:
    import webdataset

    shards = sorted(str(path) for path in Path(job.path).glob("*.tar"))
    found = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False, seed=0).repeat()
    found = found.shuffle(job.shuffle_buffer_size).decode("pil").to_tuple("jpg", "json")
    found = found.batched(job.batch_size, collation_fn=collate)
    return webdataset.WebLoader(found, batch_size=None, num_workers=job.workers)


def with_energon(job: Job, collate: Collate) -> Any:
    import megatron.energon as energon

    @energon.edataclass
    class Chat(energon.Sample):
        image: Any
        record: Any

    @energon.stateless
    def cook(sample: dict[str, Any]) -> Chat:
        return Chat(**energon.basic_sample_keys(sample), image=sample["jpg"], record=sample["json"])

    class Encoder(energon.DefaultTaskEncoder):
        cookers = (energon.Cooker(cook),)
        decoder = energon.SampleDecoder(image_decode="pilrgb")

        @energon.stateless
        def batch(self, samples: list[Chat]) -> dict[str, Any]:
            return collate([(sample.image, sample.record) for sample in samples])

    return loader_of(energon, job, Encoder())


def ours(job: Job, folder: Path) -> Any:
    import energon_bridge
    from energon_bridge.models.families import ChatConfig, ChatSample, ChatTemplateTaskEncoder

    def cook(sample: dict[str, Any]) -> ChatSample:
        keys = energon_bridge.basic_sample_keys(sample)
        return ChatSample(**keys, messages=sample["json"]["messages"], images=[sample["jpg"]])

    class Encoder(ChatTemplateTaskEncoder):
        cookers = (energon_bridge.Cooker(energon_bridge.stateless(cook)),)

    return loader_of(energon_bridge, job, Encoder.from_pretrained(folder, ChatConfig(seq_length=SEQ_LENGTH)))


def loader_of(package: Any, job: Job, encoder: Any) -> Any:
    dataset = package.get_train_dataset(
        job.path,
        batch_size=job.batch_size,
        shuffle_buffer_size=job.shuffle_buffer_size,
        max_samples_per_sequence=job.slice_size,
        task_encoder=encoder,
        worker_config=package.WorkerConfig(rank=0, world_size=1, num_workers=job.workers),
    )
    return package.get_loader(dataset)


def open_loader(job: Job) -> Any:
    """Return the loader of a job."""
    model, _, library = job.mode.partition("/")
    folder = Path(job.path).parent / model
    if library == "ours":
        return ours(job, folder)
    return {"webdataset": with_webdataset, "energon": with_energon}[library](job, Collate(folder))


def touch(batch: Any) -> list[str]:
    """Return an entry for each row of a batch."""
    rows = batch["input_ids"] if isinstance(batch, dict) else batch.tokens
    return [""] * len(rows)


if __name__ == "__main__":
    main(open_loader, touch)
