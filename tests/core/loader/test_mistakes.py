"""Mistakes in a program or its configuration stop a run with the remedy, early, and are never taken for bad data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import PackingEncoder, counts_of, loaders_of, text_dataset, train_dataset, with_prepared

from energon_bridge import (
    AugmentTaskEncoder,
    Cooker,
    DefaultTaskEncoder,
    ErrorPolicy,
    SampleDecoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
    stateless,
)
from energon_bridge.core.errors import ConfigurationError, FatalSampleError, UnfitSampleError
from energon_bridge.core.format.field_map import FieldMap
from energon_bridge.core.loader.savable import SavableDataLoader
from energon_bridge.tools.testing import create_captioning_test_dataset

HERE = r"test_mistakes\.py:\d+, in"
Hook = Callable[[Any, Any], Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the datasets `texts` and `captions`."""
    folder = tmp_path_factory.mktemp("mistakes")
    text_dataset(folder / "texts", train=[20, 20], val=[8])
    create_captioning_test_dataset(folder / "captions", num_train=40, num_val=8, samples_per_shard=10)
    return folder


def with_hook(name: str, function: Hook, kind: type[Any] = DefaultTaskEncoder) -> Any:
    """Return an encoder with one hook."""
    return type("Mistaken", (kind,), {name: function})()


def loader_of(data: Path, encoder: Any, workers: int = 0, state: Any = None, **kwargs: Any) -> SavableDataLoader:
    packs = {"packing_buffer_size": 11} if isinstance(encoder, PackingEncoder) else {}
    dataset = train_dataset(data / "texts", task_encoder=encoder, **packs, **kwargs)
    (loader,) = loaders_of(dataset, 1, workers, state=state, num_lanes=2)
    return loader


def mixed(data: Path, encoder: Any, workers: int = 0, captions: int = 1, **kwargs: Any) -> SavableDataLoader:
    """Return a loader of a mix of both types, so many captions to a text."""
    mix = [(str(data / "captions"), captions), (str(data / "texts"), 1)]
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers, num_lanes=2)
    return get_savable_loader(
        get_train_dataset(mix, task_encoder=encoder, worker_config=config, **({"batch_size": 4} | kwargs))
    )


# Types that do not go together ---------------------------------------------------------------------------------------


def test_a_mix_of_types_is_refused_at_once_where_the_default_hooks_would_batch_it(data: Path) -> None:
    complaint = (
        r"\(CaptioningSample: .*captions; TextSample: .*texts\), which DefaultTaskEncoder cannot put into one .*"
        r"encode_sample .* its batch, .* batch_group_criterion.*get_val_datasets"
    )
    with pytest.raises(ConfigurationError, match=complaint):
        mixed(data, DefaultTaskEncoder())
    mix = [(str(data / "captions"), 1), (str(data / "texts"), 1)]
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(mix, batch_size=4, worker_config=config)
    with pytest.raises(ConfigurationError, match="different sample types"):
        get_savable_loader(dataset)
    parts = get_val_datasets(mix, batch_size=4, worker_config=config)
    assert [len(list(get_savable_loader(part))) for part, _ in parts] == [2, 2]


def grouped(self: Any, sample: Any) -> Any:
    return type(sample), None


def to_text(self: Any, sample: Any) -> Any:
    return TextSample.derive_from(sample, text=sample["text"])  # of a caption, the alias


@pytest.mark.parametrize(
    ("encoder", "kwargs"),
    [
        (DefaultTaskEncoder(), {"batch_size": None}),
        (DefaultTaskEncoder(), {"batch_size": 1}),
        (with_hook("batch_group_criterion", grouped), {}),
        (with_hook("encode_sample", to_text), {}),
        (with_hook("batch", lambda self, samples: [sample.__key__ for sample in samples]), {}),
    ],
)
def test_a_mix_of_types_is_taken_where_nothing_mixes_or_a_hook_makes_one_type(
    encoder: Any, kwargs: Any, data: Path
) -> None:
    loader = mixed(data, encoder, **kwargs)
    assert len(list(islice(loader, 20))) == 20
    assert {row["errors"] for row in loader.counters()} == {0}


@pytest.mark.parametrize(("captions", "workers"), [(1, 0), (30, 2)])
def test_types_that_a_hook_leaves_apart_stop_the_first_batch_that_has_both(
    captions: int, workers: int, data: Path
) -> None:
    loader = mixed(data, with_hook("encode_sample", lambda self, sample: sample), workers, captions)
    complaint = r"batch: .*different fields: caption, image, text .*\(row 0 is a .*Sample, row \d a .*batch_group_crit"
    with pytest.raises(FatalSampleError, match=complaint):
        list(islice(loader, 100))
    assert sum(row["errors"] for row in loader.counters()) == 0
    loader.close()


@pytest.mark.parametrize("workers", [1])
def test_a_dataset_of_which_everything_fails_alike_stops_the_run(workers: int, data: Path) -> None:
    def captions_only(self: Any, sample: Any) -> Any:
        caption = getattr(sample, "caption", None)
        return TextSample.derive_from(sample, text=caption.lower())

    loader = mixed(data, with_hook("encode_sample", captions_only), workers, captions=9)
    complaint = (
        rf"encode_sample: 20 samples of {data}/texts failed, and nothing of this dataset has been delivered. .* the "
        rf"program .*AttributeError: 'NoneType' .* 'lower' \(.*{HERE} captions_only\)\. The last one: {data}/texts: sh"
    )
    with pytest.raises(FatalSampleError, match=complaint):
        list(islice(loader, 200))
    by_path = {row["path"]: row["samples"] for row in loader.counters()}
    assert by_path[str(data / "texts")] == 0
    assert by_path[str(data / "captions")] > 50
    loader.close()


@pytest.mark.parametrize("workers", [1])
def test_datasets_that_never_go_together_stop_the_run(workers: int, data: Path) -> None:
    """Each comes alone now and then, so that something of both is delivered."""

    def as_dict(self: Any, sample: Any) -> Any:
        kind = "caption" if hasattr(sample, "caption") else "text"
        return {"__key__": sample.__key__, kind: sample["text"]}

    loader = mixed(data, with_hook("encode_sample", as_dict), workers, batch_size=2)
    both = rf"({data}/captions|{data}/texts)"
    complaint = (
        rf"batch: the last 20 microbatches with samples of both {both} and {both} failed\. "
        r".*UnfitSampleError: the rows of a batch have different fields: caption, text is in row 0 or in row 1"
    )
    with pytest.raises(FatalSampleError, match=complaint):
        list(islice(loader, 200))
    assert all(row["samples"] > 0 for row in loader.counters())
    loader.close()


# Hooks that return nothing -------------------------------------------------------------------------------------------


DRAWN = ("preencode_sample", "postencode_sample")


def nothing(self: Any, argument: Any) -> None:
    pass


def yields_nothing(self: Any, argument: Any) -> Iterator[Any]:
    yield argument
    yield None


@pytest.mark.parametrize(
    ("hook", "kind", "function", "workers", "complaint"),
    [
        *((hook, DefaultTaskEncoder, nothing, 0, "returned None: return the sample") for hook in DRAWN),
        ("encode_sample", DefaultTaskEncoder, nothing, 2, "returned None: return the sample, or raise "),
        ("batch", DefaultTaskEncoder, nothing, 0, "returned None: return the batch"),
        ("encode_batch", DefaultTaskEncoder, nothing, 2, "returned None: return the batch"),
        ("select_samples_to_pack", PackingEncoder, nothing, 0, "returned None: return lists of its samples"),
        ("pack_selected_samples", PackingEncoder, nothing, 0, "returned None: return the sample"),
        ("batch_group_criterion", DefaultTaskEncoder, nothing, 0, "returned None: return the group and its"),
        ("encode_sample", DefaultTaskEncoder, yields_nothing, 0, "yielded None: yield the "),
        ("encode_batch", DefaultTaskEncoder, yields_nothing, 0, "yielded None: yield the "),
    ],
)
def test_a_hook_without_a_result_stops_the_run(
    hook: str, kind: type[Any], function: Hook, workers: int, complaint: str, data: Path
) -> None:
    with pytest.raises(FatalSampleError, match=rf"^{hook}: {data}/texts: .*{hook} of Mistaken {complaint}"):
        next(iter(loader_of(data, with_hook(hook, function, kind), workers)))


# Encoders that cannot be meant so ------------------------------------------------------------------------------------


def takes(self: Any, sample: Any) -> Any:
    return sample


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("encode_sampel", "encode_sample"),
        ("encode_samples", "encode_sample"),
        ("encodeSample", "encode_sample"),
        ("pre_encode_sample", "preencode_sample"),
        ("select_sample_to_pack", "select_samples_to_pack"),
        ("batch_group_criteria", "batch_group_criterion"),
        ("bacth", "batch"),
        ("cook_crude_samples", "cook_crude_sample"),
    ],
)
def test_a_misspelt_hook_is_refused(wrong: str, right: str, data: Path) -> None:
    complaint = rf"^Mistaken\.{wrong} is never called, .* hook {right}: rename it to {right}.* an underscore$"
    with pytest.raises(ConfigurationError, match=complaint):
        loader_of(data, with_hook(wrong, takes))
    with pytest.raises(ConfigurationError, match=complaint):
        loader_of(data, AugmentTaskEncoder(with_hook(wrong, takes)))
    base = type("Base", (DefaultTaskEncoder,), {right: getattr(DefaultTaskEncoder, right)})
    for kind in (base, type("Between", (base,), {})):  # whose hook would be called instead
        with pytest.raises(ConfigurationError, match=complaint):
            loader_of(data, with_hook(wrong, takes, kind))
    with pytest.raises(ConfigurationError, match=complaint):
        loader_of(data, type("Derived", (type(with_hook(wrong, takes, base)),), {})())


class Helpers(DefaultTaskEncoder):
    """Has helpers whose names are near those of hooks."""

    def encode_image(self, image: Any) -> Any:
        return self.build_batch(image)

    def build_batch(self, image: Any) -> Any:
        return image

    def patch(self, image: Any) -> Any:
        return image

    def encode_samples(self, samples: list[Any]) -> list[Any]:
        return samples

    def _encode_batch(self, batch: Any) -> Any:
        return batch

    def batch(self, samples: list[Any]) -> Any:
        return super().batch((lambda: self.encode_samples(samples))())


class Overriding(DefaultTaskEncoder):
    """Has a helper that nothing in the class uses, beside the hook that it could be."""

    def encode_sample(self, sample: Any) -> Any:
        return sample

    def encode_samples(self, samples: list[Any]) -> list[Any]:
        return [self.encode_sample(sample) for sample in samples]


class Derived(Overriding):
    """Overrides the helper only, and has another that it uses."""

    def encode_samples(self, samples: list[Any]) -> list[Any]:
        return samples

    def encode_simple(self, sample: Any) -> Any:
        return sample

    def batch(self, samples: list[Any]) -> Any:
        return super().batch([self.encode_simple(sample) for sample in samples])


@pytest.mark.parametrize("kind", [Helpers, Overriding, Derived])
def test_helpers_may_be_called_what_they_like(kind: type[DefaultTaskEncoder], data: Path) -> None:
    assert len(next(iter(loader_of(data, kind())))["__key__"]) == 2


def encoder_with(kind: type[Any] = DefaultTaskEncoder, **values: Any) -> Any:
    return type("Mistaken", (kind,), values)()


class Configured(DefaultTaskEncoder):
    """Has a decoder and cookers of its own."""

    decoder = SampleDecoder(image_decode="pilrgb")
    cookers = (Cooker(takes),)


@pytest.mark.parametrize(
    ("encoder", "complaint"),
    [
        (DefaultTaskEncoder, r"is the class DefaultTaskEncoder; .* task_encoder=DefaultTaskEncoder\(…\)"),
        (7, "a int .7. without encode_sample, batch, encode_batch, decoder; .* from DefaultTaskEncoder"),
        (encoder_with(decoder=SampleDecoder), r"the class SampleDecoder; .* decoder = SampleDecoder\(\)"),
        (encoder_with(decoder="pilrgb"), r"'pilrgb'; expected SampleDecoder\(image_decode='pilrgb'\), or None for raw"),
        (encoder_with(cookers=Cooker(takes)), r"is one Cooker; expected a list"),
        (encoder_with(cookers=[takes]), r"cookers\[0\] is takes; expected a Cooker: Cooker\(takes\)"),
        (encoder_with(cooker=[Cooker(takes)]), "an attribute cooker, which has no effect: rename it to cookers"),
        (encoder_with(decodr=SampleDecoder()), "an attribute decodr, which has no effect: rename it to decoder"),
        (encoder_with(Configured, cooker=[Cooker(takes)]), "Mistaken has an attribute cooker, .* rename it to cookers"),
        (encoder_with(Configured, decoders=SampleDecoder()), "Mistaken has an attribute decoders, .* it to decoder"),
        (encoder_with(encode_sample=7), r"encode_sample is 7; expected a method: def encode_sample\(self, sample\)"),
        (encoder_with(encode_sample=lambda sample: sample), r"\(sample\): too many .* def encode_sample\(self, sample"),
        (with_hook("build_batch", takes), r"Mistaken\.build_batch is a hook of megatron-energon"),
        (encoder_with(batch=lambda self: 0), r"batch cannot be called with \(samples\)"),
    ],
)
def test_an_encoder_that_cannot_be_meant_so_is_refused(encoder: Any, complaint: str, data: Path) -> None:
    for opened in (get_train_dataset, get_val_dataset):
        with pytest.raises(ConfigurationError, match=complaint):
            opened(data / "texts", batch_size=2, task_encoder=encoder, image_decode=None)


def test_attributes_of_the_kind_under_other_names_are_taken(data: Path) -> None:
    used = encoder_with(Configured, decoder2=SampleDecoder(), batch=lambda self, samples: [self.decoder2])
    assert next(iter(loader_of(data, used))) == [used.decoder2]
    loader = loader_of(data, encoder_with(image_decoder=SampleDecoder(), make=Cooker(takes), decoder=None))
    assert next(iter(loader))["text"][0].startswith(b"text")


# Errors of the program -----------------------------------------------------------------------------------------------


def of_the_type(self: Any, sample: Any) -> Any:
    return sample.txet


def of_the_type_set(self: Any, sample: Any) -> Any:
    sample.extra = 7
    return sample


def of_the_encoder(self: Any, sample: Any) -> Any:
    return self.tokeniser(sample.text)


def of_a_module(self: Any, sample: Any) -> Any:
    return math.squareroot(4)  # type: ignore[attr-defined]


def configured_wrongly(self: Any, sample: Any) -> Any:
    raise ConfigurationError("a setting")


@pytest.mark.parametrize("hook", [of_the_type, of_the_type_set, of_the_encoder, of_a_module, configured_wrongly])
def test_what_can_only_be_a_mistake_stops_at_the_first_sample(hook: Hook, data: Path) -> None:
    state = loader_of(data, DefaultTaskEncoder()).save_state_rank()
    handled = ErrorPolicy(on_error=lambda error: True, tolerance=0)
    loader = loader_of(data, with_hook("encode_sample", hook), state=state, error_policy=handled)
    complaint = rf"^encode_sample: {data}/texts: .*Error: .*\({data.anchor}.*{HERE} {hook.__name__}\)\. It is no fault"
    remedy = r".*derive a type from TextSample with @edataclass$" if hook in (of_the_type, of_the_type_set) else ""
    with pytest.raises(FatalSampleError, match=complaint + remedy):
        next(iter(loader))


def test_rows_that_do_not_fit_and_missing_values_are_bad_data(data: Path) -> None:
    class Ranks(DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            number = int(sample.__key__)
            return {"__key__": sample.__key__, "value": torch.zeros(1, 1) if number == 7 else torch.zeros(1)}

    class Fields(DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return {"__key__": sample.__key__} | ({} if sample.__key__ == "00007" else {"more": 1})

    def lower(self: Any, sample: Any) -> Any:
        text = None if sample.__key__ == "00007" else sample.text
        return TextSample.derive_from(sample, text=text.lower())

    for encoder in (Ranks(), Fields(), with_hook("encode_sample", lower)):
        loader = loader_of(data, encoder)
        batches = list(islice(loader, 60))
        assert len(batches) == 60
        assert counts_of(loader.save_state_rank())["errors"] >= 2
    assert issubclass(UnfitSampleError, ConfigurationError)


# Hooks that have never worked ----------------------------------------------------------------------------------------


def refuse(self: Any, argument: Any) -> Any:
    sample = argument[0] if isinstance(argument, list) else argument
    raise ValueError(f"no {sample['__key__']}")


NAMES = {"select_samples_to_pack": "selections", "pack_selected_samples": "packs"} | dict.fromkeys(
    ("batch", "encode_batch"), "microbatches"
)
HOOKS = ["encode_sample", "preencode_sample", "postencode_sample", "batch_group_criterion", *NAMES]


@pytest.mark.parametrize(("hook", "workers"), [*((hook, 0) for hook in HOOKS), ("encode_sample", 2), ("batch", 2)])
def test_five_equal_failures_at_first_stop_the_run(hook: str, workers: int, data: Path) -> None:
    kind = PackingEncoder if "pack" in hook else DefaultTaskEncoder
    loader = loader_of(data, with_hook(hook, refuse, kind), workers, handler=lambda error: True)
    complaint = (
        rf"^{hook}: the first 5 {NAMES.get(hook, 'samples')} of this process failed, and nothing has been delivered\. "
        rf".*ValueError: no [^(]+ \(.*{HERE} refuse\)\. The last one: {data}/texts: .*SkipSample.*tolerance=100"
    )
    for _ in range(2):  # it does not go away by asking again
        with pytest.raises(FatalSampleError, match=complaint):
            next(iter(loader))


@pytest.mark.parametrize("workers", [2])
def test_a_field_map_that_fits_no_sample_stops_the_run(workers: int, data: Path) -> None:
    dataset = with_prepared(train_dataset(data / "texts"), field_map=FieldMap({"text": "caption"}))
    (loader,) = loaders_of(dataset, 1, workers, num_lanes=2)
    with pytest.raises(FatalSampleError, match=r"^field_map: the first 5 samples .*field `text`: nothing at 'caption'"):
        next(iter(loader))


class Later(DefaultTaskEncoder):
    """Works a few times, and never again."""

    def __init__(self, hook: str, good: int) -> None:
        super().__init__()
        self.hook, self.left = hook, good

    def _may_fail(self, hook: str) -> None:
        if hook == self.hook:
            self.left -= 1
            if self.left < 0:
                raise ValueError("no more")

    def encode_sample(self, sample: Any) -> Any:
        self._may_fail("encode_sample")
        return sample

    def batch(self, samples: list[Any]) -> Any:
        self._may_fail("batch")
        return super().batch(samples)


@pytest.mark.parametrize(("hook", "good"), [("encode_sample", 1), ("batch", 4)])
def test_a_hook_that_has_worked_may_fail_a_hundred_times(hook: str, good: int, data: Path) -> None:
    loader = loader_of(data, Later(hook, good))
    with pytest.raises(FatalSampleError, match=rf"^{hook}: 100 \w+ failed in a row"):
        list(islice(loader, 10))


@pytest.mark.parametrize("workers", [2])
def test_a_run_that_goes_on_may_fail_a_hundred_times(workers: int, data: Path) -> None:
    """A run that would go on must also do so if it is stopped and resumed where data is bad."""
    before = loader_of(data, DefaultTaskEncoder())
    list(islice(before, 2))
    state = before.save_state_rank()
    loader = loader_of(data, with_hook("encode_sample", refuse), workers, state)
    with pytest.raises(FatalSampleError, match=r"^encode_sample: 100 samples failed in a row"):
        next(iter(loader))
    sought = loader_of(data, with_hook("encode_sample", refuse), workers)
    sought.seek(2)
    with pytest.raises(FatalSampleError, match=r"^encode_sample: 100 samples failed in a row"):
        next(iter(sought))


class Marked(DefaultTaskEncoder):
    @stateless(failure_tolerance=30)
    def encode_sample(self, sample: Any) -> Any:
        return refuse(self, sample)


@pytest.mark.parametrize(
    ("encoder", "policy", "failures"),
    [
        (Marked(), ErrorPolicy(), 30),
        (Marked(), ErrorPolicy(tolerance=5), 5),
        (type("Of", (DefaultTaskEncoder,), {"encode_sample": refuse, "__default_failure_tolerance__": 12})(), None, 12),
        (with_hook("encode_sample", refuse), ErrorPolicy(tolerance=100), 100),
        (with_hook("encode_sample", refuse), ErrorPolicy(tolerance=3), 3),
    ],
)
def test_a_tolerance_that_was_chosen_holds_from_the_beginning(
    encoder: Any, policy: ErrorPolicy | None, failures: int, data: Path
) -> None:
    with pytest.raises(FatalSampleError, match=f"^encode_sample: {failures} samples failed in a row"):
        next(iter(loader_of(data, encoder, error_policy=policy)))


def test_samples_of_which_some_work_go_on(data: Path) -> None:
    def first_ten(self: Any, sample: Any) -> Any:
        if int(sample.__key__) % 10:
            raise ValueError("not one of ten")
        return sample

    encoder = with_hook("encode_sample", first_ten)
    loader = loader_of(data, encoder, batch_size=8, error_policy=ErrorPolicy(messages=0))
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    in_order = get_val_dataset(data / "texts", batch_size=8, task_encoder=encoder, worker_config=config)
    assert sum(int(batch.__valid__.sum()) for batch in get_savable_loader(in_order)) == 1
    assert {key for batch in islice(loader, 6) for key in batch["__key__"]} == {"00000", "00010", "00020", "00030"}
